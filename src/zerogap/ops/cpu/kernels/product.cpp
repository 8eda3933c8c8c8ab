// Matrix products over packed panels: forward of fused projections and their input gradients, with leaves.
//
// A work item is one panel (64 columns) times one block of rows (product_worker.h). Threads claim one item ahead, so
// that its panel can be prefetched.
#include "product_worker.h"

namespace zg {
namespace {

constexpr int64_t LOW_ROWS = 16;  // no lower block for the threads' sake: each reads the panel anew

struct Plan {
    const ProductArgs& args;
    int64_t segments;  // that own panels
    int64_t panels, blocks, block_rows;

    Plan(const ProductArgs& a, int threads) : args(a), segments(a.mode == CONCATENATE ? a.num_segments : 1), panels(0) {
        for (int64_t s = 0; s < segments; s++) panels += ceil_div(a.segment[s].width, PANEL);
        blocks = max_of(ceil_div(a.rows, BLOCK_ROWS), 1);
        // More blocks where whole panels would leave threads idle at the end; not so many that tiles get low.
        int64_t best = blocks;
        for (int64_t b = blocks + 1; b <= min_of(blocks + 3, a.rows / LOW_ROWS) && lost(best, threads) > 0.03; b++)
            if (lost(b, threads) < lost(best, threads)) best = b;
        block_rows = ceil_div(a.rows, best);
        blocks = block_rows ? ceil_div(a.rows, block_rows) : 0;
    }
    int64_t items() const { return panels * blocks; }
    // Share of the threads' time that is lost when `panels * b` equal items are dealt out.
    double lost(int64_t b, int threads) const {
        const int64_t each = ceil_div(panels * b, threads) * threads;
        return each ? double(each - panels * b) / double(each) : 0;
    }
    Item item(int64_t index) const {
        Item it{0, index / blocks, index % blocks * block_rows, 0};
        it.rows = min_of(block_rows, args.rows - it.row);
        for (int64_t count; it.panel >= (count = ceil_div(args.segment[it.segment].width, PANEL)); it.segment++)
            it.panel -= count;
        return it;
    }
};

template <typename T> void product(const ProductArgs& args, Team& team) {
    const Plan plan(args, team.size);
    const int64_t items = plan.items();
    Operand operands[4];
    int64_t levels = 2;
    for (int64_t i = 0; i < args.num_segments; i++) {
        const ProductSegment& s = args.segment[i];
        operands[i] = {s.x, s.reduce, s.panels, s.bias, s.out, s.width, s.width, s.reduce, s.leaf_size,
                       s.x_scales, s.panel_scales, s.scale_row_stride, s.scale_col_stride};
        int64_t need = 2;  // the deepest tree, and the total of TREES below it
        for (int64_t n = num_leaves(operands[i]); n > 1; n = (n + 1) / 2) need++;
        levels = max_of(levels, need);
    }
    const Scratch scratch = Scratch::of(team, levels, plan.block_rows);
    int64_t index = team.next(0);
    while (index < items) {
        const int64_t following = team.next(0);
        const Item item = plan.item(index), next = plan.item(min_of(following, items - 1));
        const bool ahead = following < items && (next.panel != item.panel || next.segment != item.segment);
        Worker<T>{operands, args.num_segments, args.mode, bool(args.out_fp32), item, ahead ? operands : nullptr, next,
                  scratch}
            .run();
        index = following;
    }
}

template <typename T> void finish_sums(const FinishArgs& args, Team& team) {
    const T* bias = static_cast<const T*>(args.bias);
    for (int64_t row; (row = team.next(0)) < args.rows;)
        for (int64_t column = 0; column < args.n; column += LANES) {
            const int64_t count = args.n - column, at = row * args.n + column;
            F16 y = load_n(args.sums[0] + at, count);
            for (int64_t i = 1; i < args.num_sums; i++) y = y + load_n(args.sums[i] + at, count);
            if (bias) y = y + load_n(bias + column, count);
            store_n(static_cast<T*>(args.out) + at, y, count);
        }
}

}  // namespace

void run_product(const void* args, Team& team) {
    const ProductArgs& a = *static_cast<const ProductArgs*>(args);
    if (a.storage) product<bf16>(a, team);
    else product<float>(a, team);
}

void run_finish(const void* args, Team& team) {
    const FinishArgs& a = *static_cast<const FinishArgs*>(args);
    if (a.storage) finish_sums<bf16>(a, team);
    else finish_sums<float>(a, team);
}

}  // namespace zg
