// What the backward passes of attention and of latent attention share: tiles of 64 rows of a sample, how they are
// packed as operands, the product over them, the order of dQ among key tiles, and the tree over leaves.
#pragma once
#include "attention.h"
#include "turn.h"
#include <sched.h>

namespace zg {
namespace {

constexpr int64_t TILE = BLOCK_KEYS;

struct Span { int64_t begin, rows, index, last; };  // first row, rows, tile index in the sample, index of its last tile

// The tile-th tile of 64 rows, samples in order.
static inline Span find_tile(const int32_t* sample_starts, int64_t tile) {
    for (int64_t s = 0;; s++) {
        const int64_t begin = sample_starts[s], length = sample_starts[s + 1] - begin;
        const int64_t tiles = ceil_div(length, TILE);
        if (tile < tiles) return {begin + tile * TILE, min_of(TILE, length - tile * TILE), tile, tiles - 1};
        tile -= tiles;
    }
}

// Rows a and b side by side: out[i] = (a[i], b[i]).
static inline void interleave(const bf16* __restrict a, const bf16* __restrict b, uint32_t* __restrict out, int64_t count) {
    for (int64_t i = 0; i < count; i++) out[i] = uint32_t(a[i]) | uint32_t(b[i]) << 16;
}

// [count][width] -> steps along rows, [count / W][width][W].
static inline void pair_rows(const bf16* in, int64_t count, int64_t width, bf16* out) {
    for (int64_t r = 0; r < count; r += 2)
        interleave(in + r * width, in + (r + 1) * width, words(out + r * width), width);
}
static inline void pair_rows(const float* in, int64_t count, int64_t width, float* out) {
    memcpy(out, in, count * width * sizeof(float));
}

// 64 rows of a sample at `stride`; missing ones are zero.
template <class T> void gather_rows(const T* source, int64_t stride, int64_t rows, int64_t D, T* out) {
    for (int64_t r = 0; r < rows; r++) memcpy(out + r * D, source + r * stride, D * sizeof(T));
    memset(out + rows * D, 0, (TILE - rows) * D * sizeof(T));
}

// Rows are lanes of 64 rows [64][D]: [D / W][64][W].
template <class T> void spread_rows(const T* rows, int64_t D, T* lanes) {
    transpose(words(rows), TILE, D / Step<T>::WIDTH, words(lanes));
}

// c[r][column] (row stride c_stride) = or += the chain over `steps` of a[r] and b, b being [steps][b_width][W].
template <class T> struct Product {
    const T* a;
    int64_t a_stride, steps;
    const T* b;
    int64_t b_width;
    float* c;
    int64_t c_stride;
    bool from_zero;
    template <int ROWS, int COLS> void call() {
        constexpr int W = Step<T>::WIDTH;
        F16 acc[ROWS][COLS];
        const T* columns[COLS];
        for (int i = 0; i < COLS; i++) {
            columns[i] = b + i * LANES * W;
            for (int r = 0; r < ROWS; r++) acc[r][i] = from_zero ? zero() : load(c + r * c_stride + i * LANES);
        }
        accumulate<T, ROWS, COLS>(acc, steps, a, a_stride, columns, b_width * W);
        for (int r = 0; r < ROWS; r++)
            for (int i = 0; i < COLS; i++) store(c + r * c_stride + i * LANES, acc[r][i]);
    }
};

template <class T>
void multiply(int64_t rows, const T* a, int64_t a_stride, int64_t steps, const T* b, int64_t width, float* c,
              bool from_zero) {
    constexpr int W = Step<T>::WIDTH;
    const int64_t vectors = width / LANES, col_parts = ceil_div(vectors, MAX_LANES);
    const int64_t row_parts = ceil_div(rows, MAX_ROWS);
    for (int64_t j = 0; j < col_parts; j++) {
        const int64_t column = j * vectors / col_parts, columns = (j + 1) * vectors / col_parts - column;
        for (int64_t i = 0; i < row_parts; i++) {
            const int64_t row = i * rows / row_parts, count = (i + 1) * rows / row_parts - row;
            Product<T> product{a + row * a_stride, a_stride, steps, b + column * LANES * W, width,
                               c + row * width + column * LANES, width, from_zero};
            with_size(int(count), int(columns), product);
        }
    }
}

static inline void wait_for(const int32_t* progress, int32_t value) {
    for (int spins = 0; __atomic_load_n(progress, __ATOMIC_ACQUIRE) != value; spins++)
        if (spins > 200) sched_yield();
}

// Sums parts[leaf - first] over the leaves [low, high) that exist, by the fixed tree; the result is the first part.
static inline float* tree_sum(float* parts, int64_t size, int64_t first, int64_t end, int64_t low, int64_t high) {
    if (high <= first || low >= end) return nullptr;
    if (high - low == 1) return parts + (low - first) * size;
    const int64_t middle = (low + high) / 2;
    float* left = tree_sum(parts, size, first, end, low, middle);
    float* right = tree_sum(parts, size, first, end, middle, high);
    if (!left || !right) return left ? left : right;
    for (int64_t i = 0; i < size; i += LANES) store(left + i, load(left + i) + load(right + i));
    return left;
}

}  // namespace
}  // namespace zg
