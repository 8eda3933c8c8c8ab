// One work item of a product: a panel (64 columns) against a block of rows, leaf by leaf (product.cpp,
// product_grouped.cpp).
//
// The panel's reduced axis is walked leaf by leaf, each leaf into its own block of accumulators, and finished leaves
// are merged like a binary counter: that is the fixed tree (adjacent pairs, an odd last one passes up). FP8 operands go
// through a leaf scale block by scale block. A row's bits depend on the row and the weight alone: not on how items are
// cut, nor on whose rows stand next to it.
#pragma once
#include "product_fp8.h"
#include <type_traits>

namespace zg {
namespace {

constexpr int64_t BLOCK_ROWS = 96;     // rows of an item: their slice of x stays in the second-level cache
constexpr int64_t STREAM_ROWS = 4;     // up to so many, memory and not arithmetic sets the pace
constexpr int64_t CHUNK_STEPS = 1024;  // steps per visit of a panel: 256 KB, so that it stays there too

// One weight and the rows that it multiplies. Strides count elements from one row to the next; fields as in
// ProductSegment.
struct Operand {
    const void* x;
    int64_t x_stride;
    const void *panels, *bias;
    void* out;
    int64_t out_stride, width, reduce, leaf_size;
    const float *x_scales, *panel_scales;  // x_scales [rows, ceil(reduce / 128)]
    int64_t scale_row_stride, scale_col_stride;
};

struct Item {
    int64_t segment, panel;  // where segments are summed, segment is 0
    int64_t row, rows;
};

static inline int64_t leaf_size(const Operand& s) { return s.leaf_size > 0 ? s.leaf_size : max_of(s.reduce, 1); }
static inline int64_t num_leaves(const Operand& s) { return max_of(ceil_div(s.reduce, leaf_size(s)), 1); }

// Scratch of a thread that runs items.
struct Scratch {
    float* blocks;       // [level][rows][PANEL]
    int64_t level_size;
    bf16* unpacked;      // scale blocks of an FP8 panel, where an operand has one

    static Scratch of(Team& team, int64_t levels, int64_t rows) {
        const int64_t level_size = rows * PANEL, level_bytes = levels * level_size * int64_t(sizeof(float));
        const int64_t unpacked_bytes = SPAN_BLOCKS * UNPACKED * int64_t(sizeof(bf16));
        char* bytes = static_cast<char*>(team.scratch_bytes(level_bytes + unpacked_bytes));
        return {reinterpret_cast<float*>(bytes), level_size, reinterpret_cast<bf16*>(bytes + level_bytes)};
    }
};

template <typename T> struct Worker {
    const Operand* operands;  // one per segment
    int64_t num_segments;
    int32_t mode;             // ProductMode
    bool out_fp32;
    Item item;
    const Operand* next_operands;  // of the next item, whose panels are prefetched; null: nobody's
    Item next;
    Scratch scratch;

    float* level(int64_t i) { return scratch.blocks + i * scratch.level_size; }
    // Element k, the first of a step, of an item's panel.
    static const char* panel(const Item& it, const Operand& s, int64_t k) {
        const int64_t bytes = s.panel_scales ? 1 : sizeof(T);
        return static_cast<const char*>(s.panels) + (it.panel * panel_size<T>(s.reduce) + k * PANEL) * bytes;
    }
    // The same element in the next item's panel, to prefetch, or null. In CONCATENATE the next item may lie in another
    // segment; its panels are then shorter or longer, or of another type. With one low tile a panel is a plain stream
    // that runs at the memory's pace: there the hardware prefetches better (by a quarter) than any instruction.
    const char* far_ahead(int64_t segment, int64_t k) const {
        if (!next_operands || item.rows <= STREAM_ROWS) return nullptr;
        const Operand &s = operands[segment], &n = next_operands[mode == CONCATENATE ? next.segment : segment];
        if (n.reduce != s.reduce || !n.panel_scales != !s.panel_scales) return nullptr;
        return panel(next, n, k);
    }

    // Runs elements [from, to) of a segment's reduced axis through the accumulators of all rows.
    void slice(int64_t segment, int64_t from, int64_t to, float* c, bool start) {
        const Operand& s = operands[segment];
        if (from == to && start) return zero_block(c);
        if constexpr (std::is_same_v<T, bf16>)
            if (s.panel_scales) return scaled_slice(s, segment, from, to, c, start);
        constexpr int64_t PER = Storage<T>::PER_STEP;
        const int64_t tiles = ceil_div(item.rows, int64_t(Storage<T>::TILE_ROWS));
        for (int64_t k = from; k < to; k += CHUNK_STEPS * PER) {
            const int64_t end = min_of(to, k + CHUNK_STEPS * PER);
            const T* x = static_cast<const T*>(s.x) + item.row * s.x_stride + k;
            const T* b = reinterpret_cast<const T*>(panel(item, s, k));
            const char* far = far_ahead(segment, k);
            int64_t row = 0;
            for (int64_t t = 0; t < tiles; t++) {
                const int64_t rows = ceil_div(item.rows - row, tiles - t);
                // The next panel has four lines per step; all tiles together prefetch them, as evenly as may be.
                const int64_t done = 4 * t / tiles, lines = far ? 4 * (t + 1) / tiles - done : 0;
                const char* p = far + done * steps_of<T>(end - k) * 64;
                const T* a = x + row * s.x_stride;
                float* out = c + row * PANEL;
                const bool fresh = start && k == from;
                if (lines == 0) any_tile<T, false, 0>(rows, a, s.x_stride, b, out, end - k, fresh, nullptr);
                else if (lines == 1) any_tile<T, false, 1>(rows, a, s.x_stride, b, out, end - k, fresh, p);
                else if (lines == 2) any_tile<T, false, 2>(rows, a, s.x_stride, b, out, end - k, fresh, p);
                else any_tile<T, false, 4>(rows, a, s.x_stride, b, out, end - k, fresh, p);
                row += rows;
            }
        }
    }
    void scaled_slice(const Operand& s, int64_t segment, int64_t from, int64_t to, float* c, bool start) {
        const int64_t across = ceil_div(s.reduce, QUANT_BLOCK), scale_row = item.panel * PANEL / QUANT_BLOCK;
        for (int64_t k = from; k < to; k += SPAN_BLOCKS * QUANT_BLOCK) {
            const int64_t column = k / QUANT_BLOCK;
            SpanProduct span;
            span.x = static_cast<const bf16*>(s.x) + item.row * s.x_stride + k;
            span.lda = s.x_stride;
            span.rows = item.rows;
            span.reduce = min_of(SPAN_BLOCKS * QUANT_BLOCK, to - k);
            span.codes = reinterpret_cast<const uint8_t*>(panel(item, s, k));
            span.x_scales = s.x_scales + item.row * across + column;
            span.x_scale_stride = across;
            span.panel_scales = s.panel_scales + scale_row * s.scale_row_stride + column * s.scale_col_stride;
            span.panel_scale_stride = s.scale_col_stride;
            span.c = c;
            span.start = start && k == from;
            span.far = far_ahead(segment, k);
            span.unpacked = scratch.unpacked;
            span.run();
        }
    }
    void zero_block(float* c) { memset(c, 0, item.rows * PANEL * sizeof(float)); }
    void add_block(float* sum, const float* right) {
        for (int64_t i = 0; i < item.rows * PANEL; i += LANES) store(sum + i, load(sum + i) + load(right + i));
    }
    void leaf_slice(int64_t segment, int64_t leaf, float* c, bool start) {
        const Operand& s = operands[segment];
        const int64_t from = leaf * leaf_size(s);
        slice(segment, from, min_of(from + leaf_size(s), s.reduce), c, start);
    }
    // The tree over segments [first, last), which run one after the other in each leaf's accumulators; ends in level
    // `base`.
    void tree(int64_t first, int64_t last, int64_t base) {
        const int64_t leaves = num_leaves(operands[first]);
        int64_t top = base;
        for (int64_t leaf = 0; leaf < leaves; leaf++, top++) {
            for (int64_t s = first; s < last; s++) leaf_slice(s, leaf, level(top), s == first);
            for (int64_t bits = leaf; bits & 1; bits >>= 1, top--) add_block(level(top - 1), level(top));
        }
        for (top--; top > base; top--) add_block(level(top - 1), level(top));
    }
    void finish() {
        const Operand& s = operands[item.segment];
        const T* bias = static_cast<const T*>(s.bias);
        for (int64_t first = 0; first < PANEL; first += LANES) {
            const int64_t column = item.panel * PANEL + first, count = s.width - column;
            if (count <= 0) break;
            const F16 offset = bias ? load_n(bias + column, count) : zero();
            for (int64_t r = 0; r < item.rows; r++) {
                F16 y = load(level(0) + r * PANEL + first);
                if (bias) y = y + offset;
                const int64_t at = (item.row + r) * s.out_stride + column;
                if (out_fp32) store_n(static_cast<float*>(s.out) + at, y, count);
                else store_n(static_cast<T*>(s.out) + at, y, count);
            }
        }
    }
    void run() {
        if (mode == CONCATENATE) tree(item.segment, item.segment + 1, 0);
        else if (mode == CHAIN) tree(0, num_segments, 0);
        else
            for (int64_t s = 0; s < num_segments; s++) {
                tree(s, s + 1, s ? 1 : 0);
                if (s) add_block(level(0), level(1));
            }
        finish();
    }
};

}  // namespace
}  // namespace zg
