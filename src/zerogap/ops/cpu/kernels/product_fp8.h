// The register tile of FP8 products: one scale block of the reduced axis, up to six rows by 64 columns.
//
// An FP8 operand is E4M3 codes with one FP32 scale per block of 128 elements of the reduced axis. Inside a block
// the grid values are multiplied and summed from +0 exactly as BF16 values are (product_tile.h): the products are exact.
// The finished block then enters the accumulator with one fused multiply-add, acc = fma(block, fl32(s_left * s_right),
// acc), blocks ascending. A row's bits do not depend on the tile's shape, nor on where codes become BF16: in registers
// (the first tile of an item) or in a scratch block that the other tiles of the item read from the first-level cache.
#pragma once
#include "e4m3.h"
#include "product_tile.h"
#include "quant.h"

namespace zg {

constexpr int64_t UNPACKED = QUANT_BLOCK * PANEL;  // elements of a panel's scale block
constexpr int64_t SPAN_BLOCKS = 8;                 // that are unpacked together: 128 KB, which the second-level cache holds

// Scales of one block: of rows `stride` apart and one panel (product), or of rows and single columns (weight gradient).
struct PanelScales {
    const float* rows;
    int64_t stride;
    float panel;
    F16 row(int m) const { return set1(rows[m * stride] * panel); }
    F16 of(F16 row, int) const { return row; }
};
struct ColumnScales {
    const float *rows, *columns;
    F16 row(int m) const { return set1(rows[m]); }
    F16 of(F16 row, int v) const { return row * load(columns + v * LANES); }
};

// A block of a panel whose values stand as BF16 pairs, as in a BF16 panel.
struct Unpacked {
    const bf16* lines;
    template <int MR, int NV>
    void step(F16 (&acc)[MR][NV], const bf16* const (&a)[MR], int64_t s, int first) const {
        zg::step<MR, NV>(acc, a, lines + (s * PANEL + first * LANES) * 2);
    }
};

#if defined(__AVX512BF16__)
static inline const Decoder& decoder() {
    static const Decoder made;
    return made;
}
// A block of a panel as codes, which become BF16 pairs in registers; KEEP leaves them in `unpacked` too.
template <bool KEEP> struct Codes {
    const uint8_t* codes;
    bf16* unpacked;
    const Decoder& decoder;
    template <int MR, int NV> void step(F16 (&acc)[MR][NV], const bf16* const (&a)[MR], int64_t s, int) const {
        static_assert(NV == PANEL / LANES, "one pass over all vectors");
        P16 y[NV];
        const Decoder* table = &decoder;
        // From memory again in each step: or the compiler keeps it in registers and spills an accumulator for it.
        if (MR * NV >= 20) asm volatile("" : "+r"(table));
        for (int v = 0; v < NV; v += 2)
            table->pair(_mm512_loadu_si512(codes + s * FP8_STEP + v * 32), y[v], y[v + 1]);
        if (KEEP)
            for (int v = 0; v < NV; v++) _mm512_storeu_si512(unpacked + (s * PANEL + v * LANES) * 2, y[v]);
#pragma GCC unroll 8
        for (int m = 0; m < MR; m++) {
            P16 x = set1_pair(a[m]);
            for (int v = 0; v < NV; v++) acc[m][v] = dot_pairs(acc[m][v], x, y[v]);
        }
    }
};
#else
// `steps` steps of codes to BF16 pairs as a BF16 panel holds them.
static inline void unpack_codes(const uint8_t* codes, int64_t steps, bf16* out) {
    for (int64_t s = 0; s < steps; s++, out += 2 * PANEL)
        for (int g = 0; g < PANEL / 8; g++, codes += 16) {  // four columns of two vectors
            alignas(32) bf16 values[16];
            decode16(codes, values);
            bf16* at = out + (g / 4 * 2 * LANES + g % 4 * 4) * 2;
            memcpy(at, values, 16);
            memcpy(at + 2 * LANES, values + 8, 16);
        }
}
#endif

// c [MR, PANEL], rows `ldc` apart: fma(block, scale, c), where block is the sum over `reduce` elements from +0; `start`
// stands for c = +0. Left operand, odd tails and prefetches as in product_tile.h.
template <int MR, bool PACKED, int LINES, typename Right, typename Scales>
static void scaled_tile(const bf16* a, int64_t lda, const Right& right, float* c, int64_t ldc, int64_t reduce, bool start,
                        const Scales& scales, const char* ahead) {
    constexpr int NV = tile_vectors(MR);
    const int64_t whole = reduce / 2;
    for (int first = 0; first < PANEL / LANES; first += NV) {
        F16 acc[MR][NV];  // in registers throughout, so loops over it are unrolled
#pragma GCC unroll 8
        for (int m = 0; m < MR; m++)
#pragma GCC unroll 4
            for (int v = 0; v < NV; v++) acc[m][v] = zero();
        for (int64_t s = 0; s < whole; s++) {
            if (LINES && first == 0) prefetch_lines<LINES>(ahead, s);
            const bf16* x[MR];
            for (int m = 0; m < MR; m++) x[m] = left<bf16, PACKED>(a, lda, s, m);
            right.step(acc, x, s, first);
        }
        if (!PACKED && __builtin_expect(whole * 2 < reduce, 0)) {
            bf16 last[MR][2];
            const bf16* x[MR];
            for (int m = 0; m < MR; m++) {
                last[m][0] = *left<bf16, PACKED>(a, lda, whole, m);
                last[m][1] = 0;
                x[m] = last[m];
            }
            right.step(acc, x, whole, first);
        }
#pragma GCC unroll 8
        for (int m = 0; m < MR; m++) {
            const F16 row = scales.row(m);
            float* at = c + m * ldc + first * LANES;
#pragma GCC unroll 4
            for (int v = 0; v < NV; v++, at += LANES)
                store(at, fma(acc[m][v], scales.of(row, first + v), start ? zero() : load(at)));
        }
    }
}

template <bool PACKED, int LINES, typename Right, typename Scales>
static inline void any_scaled_tile(int64_t rows, const bf16* a, int64_t lda, const Right& right, float* c, int64_t ldc,
                                   int64_t reduce, bool start, const Scales& scales, const char* ahead) {
    switch (rows) {
        case 1: return scaled_tile<1, PACKED, LINES>(a, lda, right, c, ldc, reduce, start, scales, ahead);
        case 2: return scaled_tile<2, PACKED, LINES>(a, lda, right, c, ldc, reduce, start, scales, ahead);
    }
    if constexpr (Storage<bf16>::TILE_ROWS >= 4) switch (rows) {
        case 3: return scaled_tile<3, PACKED, LINES>(a, lda, right, c, ldc, reduce, start, scales, ahead);
        case 4: return scaled_tile<4, PACKED, LINES>(a, lda, right, c, ldc, reduce, start, scales, ahead);
    }
    if constexpr (Storage<bf16>::TILE_ROWS >= 6) switch (rows) {
        case 5: return scaled_tile<5, PACKED, LINES>(a, lda, right, c, ldc, reduce, start, scales, ahead);
        case 6: return scaled_tile<6, PACKED, LINES>(a, lda, right, c, ldc, reduce, start, scales, ahead);
    }
    __builtin_trap();
}

// Some scale blocks of a panel against all rows of an item: tile of rows by tile of rows, each through all the blocks.
// The first tile leaves the blocks unpacked for the others.
struct SpanProduct {
    const bf16* x;  // [rows, lda], the first block's first element
    int64_t lda, rows, reduce;
    const uint8_t* codes;
    const float* x_scales;  // [rows, x_scale_stride], the first block's column
    int64_t x_scale_stride;
    const float* panel_scales;  // of block i: panel_scales[i * panel_scale_stride]
    int64_t panel_scale_stride;
    float* c;  // [rows, PANEL]
    bool start;
    const char* far;  // the same codes in the panel after this one, to prefetch, or null
    bf16* unpacked;   // scratch, [SPAN_BLOCKS][UNPACKED]

    // Elements [k, k + count) of rows [row, row + height).
    template <typename Right>
    void block(int64_t row, int64_t height, int64_t k, int64_t count, const Right& right, int64_t t, int64_t tiles) const {
        // A step of codes has two lines; all tiles together prefetch those of the next panel, as evenly as may be.
        const int64_t done = 2 * t / tiles, lines = far ? 2 * (t + 1) / tiles - done : 0, b = k / QUANT_BLOCK;
        const char* p = far + k * PANEL + done * ceil_div(count, 2) * 64;
        const PanelScales scales{x_scales + row * x_scale_stride + b, x_scale_stride, panel_scales[b * panel_scale_stride]};
        const bf16* a = x + row * lda + k;
        const bool fresh = start && k == 0;
        float* out = c + row * PANEL;
        if (lines == 0) any_scaled_tile<false, 0>(height, a, lda, right, out, PANEL, count, fresh, scales, nullptr);
        else if (lines == 1) any_scaled_tile<false, 1>(height, a, lda, right, out, PANEL, count, fresh, scales, p);
        else any_scaled_tile<false, 2>(height, a, lda, right, out, PANEL, count, fresh, scales, p);
    }
    void run() const {
        const int64_t tiles = ceil_div(rows, int64_t(Storage<bf16>::TILE_ROWS));
        for (int64_t t = 0, row = 0, height; t < tiles; t++, row += height) {
            height = ceil_div(rows - row, tiles - t);
            for (int64_t k = 0; k < reduce; k += QUANT_BLOCK) {
                const int64_t count = min_of(QUANT_BLOCK, reduce - k);
                bf16* lines = unpacked + k * PANEL;
#if defined(__AVX512BF16__)
                const uint8_t* bytes = codes + k * PANEL;
                if (tiles == 1) block(row, height, k, count, Codes<false>{bytes, nullptr, decoder()}, t, tiles);
                else if (t == 0) block(row, height, k, count, Codes<true>{bytes, lines, decoder()}, t, tiles);
                else block(row, height, k, count, Unpacked{lines}, t, tiles);
#else
                if (t == 0) unpack_codes(codes + k * PANEL, ceil_div(count, 2), lines);
                block(row, height, k, count, Unpacked{lines}, t, tiles);
#endif
            }
        }
    }
};

}  // namespace zg
