// The register tile of FP8 products: one scale block of the reduced axis, up to six rows by 64 columns.
//
// An FP8 operand is E4M3 codes with one FP32 scale per block of 128 elements of the reduced axis. Inside a block the
// grid values are multiplied and summed from +0 exactly as BF16 values are (product_tile.h): products are exact. The
// finished block then enters the accumulator with one fused multiply-add, acc = fma(block, fl32(s_left * s_right),
// acc), blocks ascending. A row's bits do not depend on the tile's shape, nor on where codes become BF16: in registers
// (the first tile of an item) or in scratch that the other tiles of the item read.
#pragma once
#include "e4m3.h"
#include "product_tile.h"
#include "quant.h"
#include <type_traits>

namespace zg {

constexpr int64_t UNPACKED = QUANT_BLOCK * PANEL;  // elements of a panel's scale block
constexpr int64_t SPAN_BLOCKS = 8;                 // unpacked together: 128 KB, which the second-level cache holds

// Scales of a run of blocks: of rows `stride` apart and one panel (product), or of one block's rows and single columns
// (weight gradient).
struct PanelScales {
    const float* rows;  // [row * stride + block]
    int64_t stride;
    const float* panel;  // [block * panel_stride]
    int64_t panel_stride;
    F16 row(int m, int64_t block) const { return set1(rows[m * stride + block] * panel[block * panel_stride]); }
    F16 of(F16 row, int) const { return row; }
};
struct ColumnScales {
    const float *rows, *columns;
    F16 row(int m, int64_t) const { return set1(rows[m]); }
    F16 of(F16 row, int v) const { return row * load(columns + v * LANES); }
};

// Blocks of a panel whose values stand as BF16 pairs, as in a BF16 panel.
struct Unpacked {
    const bf16* lines;
    template <int MR, int NV>
    ZG_INLINE void step(F16 (&acc)[MR][NV], const bf16* const (&a)[MR], int64_t s, int first) const {
        zg::step<MR, NV>(acc, a, lines + (s * PANEL + first * LANES) * 2);
    }
};

#if defined(__AVX512BF16__)
static inline const Decoder& decoder() {
    static const Decoder made;
    return made;
}
// Blocks of a panel as codes, which become BF16 pairs in registers; KEEP leaves them in `unpacked` too.
template <bool KEEP> struct Codes {
    const uint8_t* codes;
    bf16* unpacked;
    const Decoder& decoder;
    template <int MR, int NV>
    ZG_INLINE void step(F16 (&acc)[MR][NV], const bf16* const (&a)[MR], int64_t s, int first) const {
        P16 y[NV];
        const Decoder* table = &decoder;
        // From memory again in each step: or the compiler keeps it in registers and spills accumulators for it.
        asm volatile("" : "+r"(table));
        for (int v = 0; v < NV; v += 2) {
            __m512i bytes = _mm512_loadu_si512(codes + s * FP8_STEP + (first + v) * 32);
            asm volatile("" : "+v"(bytes));  // loaded once, not for each of its uses
            table->pair(bytes, y[v], y[v + 1]);
        }
        if (KEEP)
            for (int v = 0; v < NV; v++)
                _mm512_storeu_si512(unpacked + (s * PANEL + (first + v) * LANES) * 2, y[v]);
#pragma GCC unroll 8
        for (int m = 0; m < MR; m++) {
            P16 x = set1_pair(a[m]);
            for (int v = 0; v < NV; v++) acc[m][v] = dot_pairs(acc[m][v], x, y[v]);
        }
    }
};
#elif defined(__AVX2__)
// Sixteen codes, each in the high byte of a word, to BF16 grid values. A normal number's bits move by four places and
// take the other bias; zero and subnormals are looked up by their three bits, low and high byte; NaN has a code.
static inline __m256i grid_words(__m256i codes) {
    const __m256i table = _mm256_broadcastsi128_si256(_mm_setr_epi8(
        0, 0, int8_t(0x80), int8_t(0xc0), 0, 0x20, 0x40, 0x60, 0, 0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c));
    const __m256i magnitude = _mm256_and_si256(codes, _mm256_set1_epi16(0x7f00));
    const __m256i normal = _mm256_add_epi16(_mm256_srli_epi16(magnitude, 4), _mm256_set1_epi16(120 << 7));
    const __m256i places = _mm256_or_si256(_mm256_srli_epi16(magnitude, 8), magnitude);
    const __m256i small = _mm256_shuffle_epi8(table, _mm256_or_si256(places, _mm256_set1_epi16(0x0800)));
    __m256i value = _mm256_blendv_epi8(normal, small, _mm256_cmpgt_epi16(_mm256_set1_epi16(0x0800), magnitude));
    const __m256i nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7f00));
    value = _mm256_blendv_epi8(value, _mm256_set1_epi16(0x7fc0), nan);
    return _mm256_or_si256(value, _mm256_andnot_si256(_mm256_set1_epi16(0x7fff), codes));
}
// `steps` steps of codes to BF16 pairs as a BF16 panel holds them.
static inline void unpack_codes(const uint8_t* codes, int64_t steps, bf16* out) {
    const __m256i none = _mm256_setzero_si256();
    for (int64_t s = 0; s < steps; s++, out += 2 * PANEL)
        for (int g = 0; g < PANEL / 8; g += 2, codes += 32) {  // eight columns of two vectors
            const __m256i bytes = _mm256_loadu_si256((const __m256i*)codes);
            bf16* at = out + (g / 4 * 2 * LANES + g % 4 * 4) * 2;
            _mm256_storeu_si256((__m256i*)at, grid_words(_mm256_unpacklo_epi8(none, bytes)));
            _mm256_storeu_si256((__m256i*)(at + 2 * LANES), grid_words(_mm256_unpackhi_epi8(none, bytes)));
        }
}
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

// How many of a panel's vectors a tile works on at once. Where several tiles share a panel, half of them on AVX-512:
// then the sums over blocks stay in registers too, and storing them after each block would cost more than loads.
#if defined(__AVX512F__)
constexpr int scaled_vectors(int, bool alone) { return alone ? 4 : 2; }
constexpr bool holds_sums(int rows, int vectors) { return rows * vectors <= 12; }
#else
constexpr int scaled_vectors(int rows, bool) { return tile_vectors(rows); }
constexpr bool holds_sums(int, int) { return false; }
#endif

// c [MR, PANEL], rows `ldc` apart: block after block, c = fma(sum over the block's elements from +0, scale, c); `start`
// stands for c = +0. Left operand, odd tails and prefetches as in product_tile.h.
template <int MR, int NV, bool PACKED, int LINES, typename Right, typename Scales>
static void scaled_tile(const bf16* a, int64_t lda, const Right& given, float* c, int64_t ldc, int64_t reduce,
                        bool start, const Scales& scales, const char* ahead) {
    const Right right = given;  // a copy, which no store can change
    constexpr bool HOLD = holds_sums(MR, NV);
    for (int first = 0; first < PANEL / LANES; first += NV) {
        // All arrays are registers, so loops over them are unrolled.
        F16 acc[MR][NV], sum[MR][NV];
        float* const out = c + first * LANES;
        if (HOLD) {
#pragma GCC unroll 8
            for (int m = 0; m < MR; m++)
#pragma GCC unroll 4
                for (int v = 0; v < NV; v++) sum[m][v] = start ? zero() : load(out + m * ldc + v * LANES);
        }
        int64_t s = 0;
        for (int64_t block = 0; block * QUANT_BLOCK < reduce; block++) {
#pragma GCC unroll 8
            for (int m = 0; m < MR; m++)
#pragma GCC unroll 4
                for (int v = 0; v < NV; v++) acc[m][v] = zero();
            const int64_t end = min_of(reduce, (block + 1) * QUANT_BLOCK);
            for (; s < end / 2; s++) {
                if (LINES && first == 0) prefetch_lines<LINES>(ahead, s);
                const bf16* x[MR];
                for (int m = 0; m < MR; m++) x[m] = left<bf16, PACKED>(a, lda, s, m);
                right.step(acc, x, s, first);
            }
            if (!PACKED && __builtin_expect(s * 2 < end, 0)) {
                bf16 last[MR][2];
                const bf16* x[MR];
                for (int m = 0; m < MR; m++) {
                    last[m][0] = *left<bf16, PACKED>(a, lda, s, m);
                    last[m][1] = 0;
                    x[m] = last[m];
                }
                right.step(acc, x, s, first);
            }
#pragma GCC unroll 8
            for (int m = 0; m < MR; m++) {
                const F16 row = scales.row(m, block);
                float* at = out + m * ldc;
#pragma GCC unroll 4
                for (int v = 0; v < NV; v++, at += LANES) {
                    const F16 scale = scales.of(row, first + v);
                    if (HOLD) sum[m][v] = fma(acc[m][v], scale, sum[m][v]);
                    else store(at, fma(acc[m][v], scale, start && !block ? zero() : load(at)));
                }
            }
        }
        if (HOLD) {
#pragma GCC unroll 8
            for (int m = 0; m < MR; m++)
#pragma GCC unroll 4
                for (int v = 0; v < NV; v++) store(out + m * ldc + v * LANES, sum[m][v]);
        }
    }
}

// ALONE: the tile is the only one to read its panel.
template <bool ALONE, bool PACKED, int LINES, typename Right, typename Scales>
static inline void any_scaled_tile(int64_t rows, const bf16* a, int64_t lda, const Right& right, float* c, int64_t ldc,
                                   int64_t reduce, bool start, const Scales& scales, const char* ahead) {
#define ZG_ROWS(MR)                                                       \
    case MR:                                                              \
        return scaled_tile<MR, scaled_vectors(MR, ALONE), PACKED, LINES>( \
            a, lda, right, c, ldc, reduce, start, scales, ahead)
    switch (rows) {
        ZG_ROWS(1);
        ZG_ROWS(2);
    }
    if constexpr (Storage<bf16>::TILE_ROWS >= 4) switch (rows) {
        ZG_ROWS(3);
        ZG_ROWS(4);
    }
    if constexpr (Storage<bf16>::TILE_ROWS >= 6) switch (rows) {
        ZG_ROWS(5);
        ZG_ROWS(6);
    }
#undef ZG_ROWS
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

    template <bool ALONE, typename Right>
    void tile(int64_t row, int64_t height, const Right& right, int64_t t, int64_t tiles) const {
        // A step of codes has two lines; all tiles together prefetch those of the next panel, as evenly as may be.
        const int64_t done = 2 * t / tiles, lines = far ? 2 * (t + 1) / tiles - done : 0;
        const char* p = far + done * ceil_div(reduce, 2) * 64;
        const PanelScales scales{x_scales + row * x_scale_stride, x_scale_stride, panel_scales, panel_scale_stride};
        const bf16* a = x + row * lda;
        float* out = c + row * PANEL;
        auto run = [&](auto count) {
            constexpr int LINES = decltype(count)::value;
            any_scaled_tile<ALONE, false, LINES>(height, a, lda, right, out, PANEL, reduce, start, scales, p);
        };
        if (lines == 0) run(std::integral_constant<int, 0>());
        else if (lines == 1) run(std::integral_constant<int, 1>());
        else run(std::integral_constant<int, 2>());
    }
    void run() const {
        const int64_t tiles = ceil_div(rows, int64_t(Storage<bf16>::TILE_ROWS));
#if defined(__AVX512BF16__)
        if (tiles == 1) return tile<true>(0, rows, Codes<false>{codes, nullptr, decoder()}, 0, 1);
#else
        unpack_codes(codes, ceil_div(reduce, 2), unpacked);
#endif
        for (int64_t t = 0, row = 0, height; t < tiles; t++, row += height) {
            height = ceil_div(rows - row, tiles - t);
#if defined(__AVX512BF16__)
            if (t == 0) {
                tile<false>(row, height, Codes<true>{codes, unpacked, decoder()}, t, tiles);
                continue;
            }
#endif
            tile<false>(row, height, Unpacked{unpacked}, t, tiles);
        }
    }
};

}  // namespace zg
