// Loops over a row in steps of sixteen lanes, tail included, and the cut of packs into blocks of rows.
#pragma once
#include "simd.h"

namespace zg {

constexpr int64_t GRAD_BLOCK = 128;     // rows of a pack that are summed from +0 before they join a weight gradient
constexpr int64_t ITEM_ELEMENTS = 4096;  // about how many elements a thread claims at a time

template <typename S> static inline F16 load_part(const S* p, int64_t n) { return n >= LANES ? load(p) : load_n(p, n); }
template <typename S> static inline void store_part(S* p, F16 a, int64_t n) {
    if (n >= LANES) store(p, a); else store_n(p, a, n);
}

// body(i, n) for i = 0, 16, ...: n is the constant 16 but for a ragged tail, whose missing lanes load as +0.
template <typename Body> static inline __attribute__((always_inline)) void over_lanes(int64_t width, Body&& body) {
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) body(i, int64_t(LANES));
    if (i < width) body(i, width - i);
}

// body(first, last) for each block of 128 rows of each pack, ascending; the tail of a pack is a shorter block.
template <typename Body> static inline void over_blocks(const int32_t* pack_starts, int64_t num_packs, Body&& body) {
    for (int64_t p = 0; p < num_packs; p++)
        for (int64_t first = pack_starts[p]; first < pack_starts[p + 1]; first += GRAD_BLOCK)
            body(first, min_of(first + GRAD_BLOCK, pack_starts[p + 1]));
}

// Rows that a thread claims at a time: a multiple of four, about ITEM_ELEMENTS.
static inline int64_t rows_per_item(int64_t width) { return max_of(4, ITEM_ELEMENTS / max_of(width, 1) / 4 * 4); }

}  // namespace zg
