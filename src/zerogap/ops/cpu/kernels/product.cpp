// Matrix products over packed panels: forward of fused projections and their input gradients, with leaves.
//
// A work item is one panel (64 columns) times one block of rows; the panel's reduced axis is walked leaf by leaf, each
// leaf into its own block of accumulators, and finished leaves are merged like a binary counter: that is the fixed tree
// (adjacent pairs, an odd last one passes up). FP8 segments go through a leaf scale block by scale block. Threads claim
// one item ahead, so that its panel can be prefetched.
#include "product_fp8.h"
#include <type_traits>

namespace zg {
namespace {

constexpr int64_t BLOCK_ROWS = 96;     // rows of an item: their slice of x stays in the second-level cache
constexpr int64_t LOW_ROWS = 16;       // no lower block for the threads' sake: each reads the panel anew
constexpr int64_t STREAM_ROWS = 4;     // up to so many, memory and not arithmetic sets the pace
constexpr int64_t CHUNK_STEPS = 1024;  // steps per visit of a panel: 256 KB, so that it stays there too

struct Item {
    int64_t segment, panel;  // where segments are summed, segment is 0
    int64_t row, rows;
};

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

static inline int64_t leaf_size(const ProductSegment& s) { return s.leaf_size > 0 ? s.leaf_size : max_of(s.reduce, 1); }
static inline int64_t num_leaves(const ProductSegment& s) { return max_of(ceil_div(s.reduce, leaf_size(s)), 1); }

template <typename T> struct Worker {
    const Plan& plan;
    Item item;
    bool ahead;        // prefetch the next item's panels
    Item next;
    float* blocks;     // [level][rows][PANEL]
    int64_t level_size;
    bf16* unpacked;    // scale blocks of an FP8 panel, where a segment has one

    float* level(int64_t i) { return blocks + i * level_size; }
    // Element k, the first of a step, of an item's panel.
    const char* panel(const Item& it, int64_t segment, int64_t k) const {
        const ProductSegment& s = plan.args.segment[segment];
        const int64_t bytes = s.panel_scales ? 1 : sizeof(T);
        return static_cast<const char*>(s.panels) + (it.panel * panel_size<T>(s.reduce) + k * PANEL) * bytes;
    }
    // The same element in the next item's panel, to prefetch, or null. In CONCATENATE the next item may lie in another
    // segment; its panels are then shorter or longer, or of another type. With one low tile a panel is a plain stream
    // that runs at the memory's pace: there the hardware prefetches better (by a quarter) than any instruction.
    const char* far_ahead(int64_t segment, int64_t k) const {
        if (!ahead || item.rows <= STREAM_ROWS) return nullptr;
        if (plan.segments == 1) return panel(next, segment, k);
        const ProductSegment &s = plan.args.segment[segment], &n = plan.args.segment[next.segment];
        if (n.reduce != s.reduce || !n.panel_scales != !s.panel_scales) return nullptr;
        return panel(next, next.segment, k);
    }

    // Runs elements [from, to) of a segment's reduced axis through the accumulators of all rows.
    void slice(int64_t segment, int64_t from, int64_t to, float* c, bool start) {
        const ProductSegment& s = plan.args.segment[segment];
        if (from == to && start) return zero_block(c);
        if constexpr (std::is_same_v<T, bf16>)
            if (s.panel_scales) return scaled_slice(s, segment, from, to, c, start);
        constexpr int64_t PER = Storage<T>::PER_STEP;
        const int64_t tiles = ceil_div(item.rows, int64_t(Storage<T>::TILE_ROWS));
        for (int64_t k = from; k < to; k += CHUNK_STEPS * PER) {
            const int64_t end = min_of(to, k + CHUNK_STEPS * PER);
            const T* x = static_cast<const T*>(s.x) + item.row * s.reduce + k;
            const T* b = reinterpret_cast<const T*>(panel(item, segment, k));
            const char* far = far_ahead(segment, k);
            int64_t row = 0;
            for (int64_t t = 0; t < tiles; t++) {
                const int64_t rows = ceil_div(item.rows - row, tiles - t);
                // The next panel has four lines per step; all tiles together prefetch them, as evenly as may be.
                const int64_t done = 4 * t / tiles, lines = far ? 4 * (t + 1) / tiles - done : 0;
                const char* p = far + done * steps_of<T>(end - k) * 64;
                const T* a = x + row * s.reduce;
                float* out = c + row * PANEL;
                const bool fresh = start && k == from;
                if (lines == 0) any_tile<T, false, 0>(rows, a, s.reduce, b, out, end - k, fresh, nullptr);
                else if (lines == 1) any_tile<T, false, 1>(rows, a, s.reduce, b, out, end - k, fresh, p);
                else if (lines == 2) any_tile<T, false, 2>(rows, a, s.reduce, b, out, end - k, fresh, p);
                else any_tile<T, false, 4>(rows, a, s.reduce, b, out, end - k, fresh, p);
                row += rows;
            }
        }
    }
    void scaled_slice(const ProductSegment& s, int64_t segment, int64_t from, int64_t to, float* c, bool start) {
        const int64_t across = ceil_div(s.reduce, QUANT_BLOCK), scale_row = item.panel * PANEL / QUANT_BLOCK;
        for (int64_t k = from; k < to; k += SPAN_BLOCKS * QUANT_BLOCK) {
            const int64_t column = k / QUANT_BLOCK;
            SpanProduct span;
            span.x = static_cast<const bf16*>(s.x) + item.row * s.reduce + k;
            span.lda = s.reduce;
            span.rows = item.rows;
            span.reduce = min_of(SPAN_BLOCKS * QUANT_BLOCK, to - k);
            span.codes = reinterpret_cast<const uint8_t*>(panel(item, segment, k));
            span.x_scales = s.x_scales + item.row * across + column;
            span.x_scale_stride = across;
            span.panel_scales = s.panel_scales + scale_row * s.scale_row_stride + column * s.scale_col_stride;
            span.panel_scale_stride = s.scale_col_stride;
            span.c = c;
            span.start = start && k == from;
            span.far = far_ahead(segment, k);
            span.unpacked = unpacked;
            span.run();
        }
    }
    void zero_block(float* c) { memset(c, 0, item.rows * PANEL * sizeof(float)); }
    void add_block(float* sum, const float* right) {
        for (int64_t i = 0; i < item.rows * PANEL; i += LANES) store(sum + i, load(sum + i) + load(right + i));
    }
    void leaf_slice(int64_t segment, int64_t leaf, float* c, bool start) {
        const ProductSegment& s = plan.args.segment[segment];
        const int64_t from = leaf * leaf_size(s);
        slice(segment, from, min_of(from + leaf_size(s), s.reduce), c, start);
    }
    // The tree over segments [first, last), which run one after the other in each leaf's accumulators; ends in level
    // `base`.
    void tree(int64_t first, int64_t last, int64_t base) {
        const int64_t leaves = num_leaves(plan.args.segment[first]);
        int64_t top = base;
        for (int64_t leaf = 0; leaf < leaves; leaf++, top++) {
            for (int64_t s = first; s < last; s++) leaf_slice(s, leaf, level(top), s == first);
            for (int64_t bits = leaf; bits & 1; bits >>= 1, top--) add_block(level(top - 1), level(top));
        }
        for (top--; top > base; top--) add_block(level(top - 1), level(top));
    }
    void finish() {
        const ProductSegment& s = plan.args.segment[item.segment];
        const T* bias = static_cast<const T*>(s.bias);
        for (int64_t first = 0; first < PANEL; first += LANES) {
            const int64_t column = item.panel * PANEL + first, count = s.width - column;
            if (count <= 0) break;
            const F16 offset = bias ? load_n(bias + column, count) : zero();
            for (int64_t r = 0; r < item.rows; r++) {
                F16 y = load(level(0) + r * PANEL + first);
                if (bias) y = y + offset;
                const int64_t at = (item.row + r) * s.width + column;
                if (plan.args.out_fp32) store_n(static_cast<float*>(s.out) + at, y, count);
                else store_n(static_cast<T*>(s.out) + at, y, count);
            }
        }
    }
    void run() {
        if (plan.args.mode == CONCATENATE) tree(item.segment, item.segment + 1, 0);
        else if (plan.args.mode == CHAIN) tree(0, plan.args.num_segments, 0);
        else
            for (int64_t s = 0; s < plan.args.num_segments; s++) {
                tree(s, s + 1, s ? 1 : 0);
                if (s) add_block(level(0), level(1));
            }
        finish();
    }
};

template <typename T> void product(const ProductArgs& args, Team& team) {
    const Plan plan(args, team.size);
    const int64_t items = plan.items();
    int64_t levels = 2;
    for (int64_t s = 0; s < args.num_segments; s++) {
        int64_t need = 2;  // the deepest tree, and the total of TREES below it
        for (int64_t n = num_leaves(args.segment[s]); n > 1; n = (n + 1) / 2) need++;
        levels = max_of(levels, need);
    }
    const int64_t level_size = plan.block_rows * PANEL;
    const int64_t level_bytes = levels * level_size * int64_t(sizeof(float));
    const int64_t unpacked_bytes = SPAN_BLOCKS * UNPACKED * int64_t(sizeof(bf16));
    char* scratch = static_cast<char*>(team.scratch_bytes(level_bytes + unpacked_bytes));
    float* blocks = reinterpret_cast<float*>(scratch);
    bf16* unpacked = reinterpret_cast<bf16*>(scratch + level_bytes);
    int64_t index = team.next(0);
    while (index < items) {
        const int64_t following = team.next(0);
        const Item item = plan.item(index), next = plan.item(min_of(following, items - 1));
        const bool ahead = following < items && (next.panel != item.panel || next.segment != item.segment);
        Worker<T>{plan, item, ahead, next, blocks, level_size, unpacked}.run();
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
