// Products of many weights of one shape, each with rows of its own: experts and attention heads.
//
// Groups are cut into the items of product_worker.h, group by group, so a row's bits are those of its group's weight in
// a product of its own. A group without rows has no items, and its weight is never read. Threads claim one item ahead,
// so that its panel can be prefetched, also where it is another group's.
#include "product_worker.h"

namespace zg {
namespace {

struct Place {
    int64_t group;
    Item item;
};

// Finds items by number. Numbers must ascend from call to call: a thread only walks forward over the groups.
struct Walk {
    const GroupedArgs& args;
    int64_t segments;  // that own panels
    int64_t panels;    // of a group
    int64_t group, first, blocks;  // where the walk is: the group, its first item, its blocks of rows

    explicit Walk(const GroupedArgs& a)
        : args(a), segments(a.mode == CONCATENATE ? a.num_segments : 1), panels(0), group(0), first(0), blocks(0) {
        for (int64_t s = 0; s < segments; s++) panels += ceil_div(a.segment[s].width, PANEL);
        if (a.groups) blocks = ceil_div(rows_of(0), BLOCK_ROWS);
    }
    int64_t rows_of(int64_t g) const { return args.starts ? args.starts[g + 1] - args.starts[g] : args.rows; }
    int64_t items() const {
        int64_t count = 0;
        for (int64_t g = 0; g < args.groups; g++) count += ceil_div(rows_of(g), BLOCK_ROWS);
        return count * panels;
    }
    Place place(int64_t index) {
        for (int64_t count; index >= first + (count = panels * blocks); blocks = ceil_div(rows_of(++group), BLOCK_ROWS))
            first += count;
        const int64_t rows = rows_of(group), each = ceil_div(rows, blocks), within = index - first;
        Item it{0, within / blocks, within % blocks * each, 0};
        it.rows = min_of(each, rows - it.row);
        for (int64_t count; it.panel >= (count = ceil_div(args.segment[it.segment].width, PANEL)); it.segment++)
            it.panel -= count;
        return {group, it};
    }
};

// The weight and rows of one group of a segment.
template <typename T> Operand operand(const GroupedArgs& args, const GroupedSegment& s, int64_t group) {
    const int64_t across = ceil_div(s.reduce, QUANT_BLOCK), row = args.starts ? args.starts[group] : 0;
    const int64_t panels = ceil_div(s.width, PANEL) * panel_size<T>(s.reduce) * (s.panel_scales ? 1 : sizeof(T));
    const int64_t out_bytes = args.out_fp32 ? sizeof(float) : sizeof(T);
    Operand o{};
    o.x = static_cast<const T*>(s.x) + row * s.x_row_stride + group * s.x_group_stride;
    o.x_stride = s.x_row_stride;
    o.panels = static_cast<const char*>(s.panels) + group * panels;
    o.out = static_cast<char*>(s.out) + (row * s.out_row_stride + group * s.out_group_stride) * out_bytes;
    o.out_stride = s.out_row_stride;
    o.width = s.width;
    o.reduce = s.reduce;
    if (s.panel_scales) {
        o.x_scales = s.x_scales + row * across;
        o.panel_scales = s.panel_scales + group * ceil_div(s.width, QUANT_BLOCK) * across;
        o.scale_row_stride = s.scale_row_stride;
        o.scale_col_stride = s.scale_col_stride;
    }
    return o;
}

// The operands of the group that an item lies in; kept while items stay in one group.
template <typename T> struct Operands {
    Operand of[4];
    int64_t group = -1;

    void enter(const GroupedArgs& args, int64_t wanted) {
        if (wanted == group) return;
        for (int64_t s = 0; s < args.num_segments; s++) of[s] = operand<T>(args, args.segment[s], wanted);
        group = wanted;
    }
};

template <typename T> void grouped_product(const GroupedArgs& args, Team& team) {
    Walk walk(args);
    const int64_t items = walk.items();
    const Scratch scratch = Scratch::of(team, 1, BLOCK_ROWS);
    Operands<T> operands, next_operands;
    int64_t index = team.next(0);
    if (index >= items) return;
    Place place = walk.place(index);
    while (index < items) {
        const int64_t following = team.next(0);
        const Place next = following < items ? walk.place(following) : place;
        operands.enter(args, place.group);
        next_operands.enter(args, next.group);
        const bool ahead = next.group != place.group || next.item.panel != place.item.panel ||
                           next.item.segment != place.item.segment;
        Worker<T>{operands.of, args.num_segments, args.mode, bool(args.out_fp32), place.item,
                  ahead ? next_operands.of : nullptr, next.item, scratch}
            .run();
        index = following;
        place = next;
    }
}

}  // namespace

void run_grouped_product(const void* args, Team& team) {
    const GroupedArgs& a = *static_cast<const GroupedArgs*>(args);
    if (a.storage) grouped_product<bf16>(a, team);
    else grouped_product<float>(a, team);
}

}  // namespace zg
