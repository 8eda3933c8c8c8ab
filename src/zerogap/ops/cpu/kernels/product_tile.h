// The register tile of every matrix product: up to six rows by 64 columns, one FP32 accumulator per element.
//
// A *step* advances the reduced axis by what one 256-byte line group of a panel holds: a pair of BF16 elements, or one
// FP32 element. Each accumulator runs its steps in ascending order with the multiply-add primitive of the backend
// class, whatever the shape of the tile, so a row's bits do not depend on which rows share its tile.
#pragma once
#include "product.h"

namespace zg {

constexpr int GROUP = 16;  // rows per group of a packed left operand (weight gradient)

// How many of a panel's four vectors a tile works on at once, by what the registers hold.
#if defined(__AVX512F__)
constexpr int tile_vectors(int) { return 4; }
#elif defined(__AVX2__)
constexpr int tile_vectors(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }
#elif defined(__aarch64__)
constexpr int tile_vectors(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }
#else
constexpr int tile_vectors(int rows) { return rows == 1 ? 2 : 1; }
#endif

// Elements of the reduced axis per step; most rows of a tile.
template <typename T> struct Storage;
#if defined(__AVX512F__)
template <> struct Storage<float> { static constexpr int PER_STEP = 1, TILE_ROWS = 6; };
template <> struct Storage<bf16> { static constexpr int PER_STEP = 2, TILE_ROWS = 6; };
#elif defined(__AVX2__)  // BF16 needs registers to take pairs apart
template <> struct Storage<float> { static constexpr int PER_STEP = 1, TILE_ROWS = 6; };
template <> struct Storage<bf16> { static constexpr int PER_STEP = 2, TILE_ROWS = 4; };
#elif defined(__aarch64__)
template <> struct Storage<float> { static constexpr int PER_STEP = 1, TILE_ROWS = 4; };
template <> struct Storage<bf16> { static constexpr int PER_STEP = 2, TILE_ROWS = 4; };
#else
template <> struct Storage<float> { static constexpr int PER_STEP = 1, TILE_ROWS = 2; };
template <> struct Storage<bf16> { static constexpr int PER_STEP = 2, TILE_ROWS = 2; };
#endif
template <typename T> static inline int64_t steps_of(int64_t reduce) { return ceil_div(reduce, Storage<T>::PER_STEP); }
template <typename T> static inline int64_t panel_size(int64_t reduce) {
    return steps_of<T>(reduce) * Storage<T>::PER_STEP * PANEL;
}

static inline void interleave(const float* row, int64_t, int64_t count, float* out) {
    store(out, load_n(row, count));
}
// 16 columns (those from `count` on are zeros) of two rows, element by element side by side; `stride` 0 stands for a
// second row of zeros.
static inline void interleave(const bf16* row, int64_t stride, int64_t count, bf16* out) {
#if defined(__AVX512F__)
    const M16 mask = first_n(count);
    __m512i even = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, row));
    __m512i odd = _mm512_setzero_si512();
    if (stride) odd = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, row + stride));
    _mm512_storeu_si512(out, _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
#else
    if (count >= LANES && stride) {
        for (int i = 0; i < LANES; i++) { out[2 * i] = row[i]; out[2 * i + 1] = row[stride + i]; }
        return;
    }
    for (int i = 0; i < LANES; i++) {
        out[2 * i] = i < count ? row[i] : 0;
        out[2 * i + 1] = i < count && stride ? row[stride + i] : 0;
    }
#endif
}

// Left operand of step s, row m: row-major (stride lda), or packed [steps][GROUP][PER_STEP].
template <typename T, bool PACKED> static inline const T* left(const T* a, int64_t lda, int64_t s, int m) {
    return PACKED ? a + (s * GROUP + m) * Storage<T>::PER_STEP : a + m * lda + s * Storage<T>::PER_STEP;
}

#define ZG_INLINE inline __attribute__((always_inline))  // a call would put the accumulators into memory

template <int MR, int NV>
static ZG_INLINE void step(F16 (&acc)[MR][NV], const float* const (&a)[MR], const float* b) {
    F16 y[NV];
    for (int v = 0; v < NV; v++) y[v] = load(b + v * LANES);
#pragma GCC unroll 8
    for (int m = 0; m < MR; m++) {
        F16 x = set1(*a[m]);
        for (int v = 0; v < NV; v++) acc[m][v] = fma(x, y[v], acc[m][v]);
    }
}
#if defined(__AVX2__) && !defined(__AVX512BF16__)
template <bool ODD> static inline __m256 half_of(__m256i pairs) { return ODD ? odd8(pairs) : even8(pairs); }
// One half of dot_pairs. Its operands are read from memory again in the other half: registers hold accumulators first.
template <bool ODD, int MR, int NV>
static inline void half_step(F16 (&acc)[MR][NV], const bf16* const (&a)[MR], const bf16* b) {
    asm volatile("" : "+r"(b));  // or the compiler keeps the pairs of both halves, and spills accumulators for them
    __m256 y[NV][2];
    for (int v = 0; v < NV; v++)
        for (int h = 0; h < 2; h++)
            y[v][h] = half_of<ODD>(_mm256_loadu_si256((const __m256i*)(b + (v * 2 + h) * LANES)));
#pragma GCC unroll 8
    for (int m = 0; m < MR; m++) {
        const bf16* word = a[m];
        asm volatile("" : "+r"(word));
        __m256 x = half_of<ODD>(set1_pair(word).a);
        for (int v = 0; v < NV; v++)
            acc[m][v] = {_mm256_fmadd_ps(x, y[v][0], acc[m][v].a), _mm256_fmadd_ps(x, y[v][1], acc[m][v].b)};
    }
}
#endif
template <int MR, int NV>
static ZG_INLINE void step(F16 (&acc)[MR][NV], const bf16* const (&a)[MR], const bf16* b) {
#if defined(__AVX2__) && !defined(__AVX512BF16__)
    half_step<true>(acc, a, b);  // odd elements first
    half_step<false>(acc, a, b);
#else
    P16 y[NV];
    for (int v = 0; v < NV; v++) y[v] = load_pairs(b + v * 2 * LANES);
#pragma GCC unroll 8
    for (int m = 0; m < MR; m++) {
        P16 x = set1_pair(a[m]);
        for (int v = 0; v < NV; v++) acc[m][v] = dot_pairs(acc[m][v], x, y[v]);
    }
#endif
}

template <int LINES> static inline void prefetch_lines(const char* ahead, int64_t s) {
    for (int i = 0; i < LINES; i++) __builtin_prefetch(ahead + (s * LINES + i) * 64, 0, 2);
}

// How a tile's accumulators begin and end.
enum TileMode {
    CONTINUE,  // from +0 where `start`, else from c; stored to c [MR][PANEL]
    ADD,       // from +0; the finished sums are added to c, rows `ldc` apart
};

// `reduce` elements of MR rows of a times a panel's slice b. An odd BF16 tail of a row-major left operand pairs with a
// zero. LINES cache lines of `ahead` are prefetched per step.
template <typename T, int MR, bool PACKED, int LINES, TileMode MODE = CONTINUE>
static void tile(const T* a, int64_t lda, const T* b, float* c, int64_t reduce, bool start, const char* ahead,
                 int64_t ldc = PANEL) {
    constexpr int NV = tile_vectors(MR), PER = Storage<T>::PER_STEP;
    const int64_t whole = reduce / PER, stride = MODE == ADD ? ldc : PANEL;
    for (int first = 0; first < PANEL / LANES; first += NV) {
        F16 acc[MR][NV];
        float* out = c + first * LANES;
        for (int m = 0; m < MR; m++)
            for (int v = 0; v < NV; v++) acc[m][v] = MODE == ADD || start ? zero() : load(out + m * PANEL + v * LANES);
        const T* line = b + first * LANES * PER;
        for (int64_t s = 0; s < whole; s++, line += PANEL * PER) {
            if (LINES && first == 0) prefetch_lines<LINES>(ahead, s);
            const T* x[MR];
            for (int m = 0; m < MR; m++) x[m] = left<T, PACKED>(a, lda, s, m);
            step<MR, NV>(acc, x, line);
        }
        if (!PACKED && whole * PER < reduce) {
            T last[MR][2];
            const T* x[MR];
            for (int m = 0; m < MR; m++) {
                last[m][0] = *left<T, PACKED>(a, lda, whole, m);
                last[m][1] = 0;
                x[m] = last[m];
            }
            step<MR, NV>(acc, x, line);
        }
        for (int m = 0; m < MR; m++)
            for (int v = 0; v < NV; v++) {
                float* at = out + m * stride + v * LANES;
                store(at, MODE == ADD ? load(at) + acc[m][v] : acc[m][v]);
            }
    }
}

template <typename T, bool PACKED, int LINES>
static inline void any_tile(int rows, const T* a, int64_t lda, const T* b, float* c, int64_t reduce, bool start,
                            const char* ahead) {
    switch (rows) {
        case 1: return tile<T, 1, PACKED, LINES>(a, lda, b, c, reduce, start, ahead);
        case 2: return tile<T, 2, PACKED, LINES>(a, lda, b, c, reduce, start, ahead);
    }
    if constexpr (Storage<T>::TILE_ROWS >= 4) switch (rows) {
        case 3: return tile<T, 3, PACKED, LINES>(a, lda, b, c, reduce, start, ahead);
        case 4: return tile<T, 4, PACKED, LINES>(a, lda, b, c, reduce, start, ahead);
    }
    if constexpr (Storage<T>::TILE_ROWS >= 6) switch (rows) {
        case 5: return tile<T, 5, PACKED, LINES>(a, lda, b, c, reduce, start, ahead);
        case 6: return tile<T, 6, PACKED, LINES>(a, lda, b, c, reduce, start, ahead);
    }
    __builtin_trap();
}

}  // namespace zg
