// The register tile of every matrix product: up to TILE_ROWS rows by 64 columns, one FP32 accumulator per element.
//
// A *step* advances the reduced axis by what one 256-byte line group of a panel holds: a pair of BF16 elements, or one
// FP32 element. Each accumulator runs its steps in ascending order with the multiply-add primitive of the backend class,
// whatever the shape of the tile, so a row's bits do not depend on which rows share its tile.
#pragma once
#include "product.h"

namespace zg {

constexpr int GROUP = 16;  // rows per group of a packed left operand (weight gradient)

// Tile height, and how many of a panel's four vectors are worked on at once, by what the registers hold.
#if defined(__AVX512F__)
constexpr int TILE_ROWS = 6;
constexpr int tile_vectors(int) { return 4; }
#elif defined(__AVX2__)
constexpr int TILE_ROWS = 6;
constexpr int tile_vectors(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }
#elif defined(__aarch64__)
constexpr int TILE_ROWS = 4;
constexpr int tile_vectors(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }
#else
constexpr int TILE_ROWS = 2;
constexpr int tile_vectors(int rows) { return rows == 1 ? 2 : 1; }
#endif

template <typename T> struct Storage;
template <> struct Storage<float> { static constexpr int PER_STEP = 1; };
template <> struct Storage<bf16> { static constexpr int PER_STEP = 2; };
template <typename T> static inline int64_t steps_of(int64_t reduce) { return ceil_div(reduce, Storage<T>::PER_STEP); }
template <typename T> static inline int64_t panel_size(int64_t reduce) { return steps_of<T>(reduce) * Storage<T>::PER_STEP * PANEL; }

    static inline void interleave(const float* row, int64_t, int64_t count, float* out) { store(out, load_n(row, count)); }
    // 16 columns (those from `count` on are zeros) of two rows, element by element side by side; `stride` 0 stands for a second row of zeros.
    static inline void interleave(const bf16* row, int64_t stride, int64_t count, bf16* out) {
#if defined(__AVX512F__)
        const M16 mask = first_n(count);
        __m512i even = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, row));
        __m512i odd = stride ? _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, row + stride)) : _mm512_setzero_si512();
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

template <int MR, int NV> static inline void step(F16 (&acc)[MR][NV], const float* const (&a)[MR], const float* b) {
    F16 y[NV];
    for (int v = 0; v < NV; v++) y[v] = load(b + v * LANES);
#pragma GCC unroll 8
    for (int m = 0; m < MR; m++) {
        F16 x = set1(*a[m]);
        for (int v = 0; v < NV; v++) acc[m][v] = fma(x, y[v], acc[m][v]);
    }
}
template <int MR, int NV> static inline void step(F16 (&acc)[MR][NV], const bf16* const (&a)[MR], const bf16* b) {
    P16 y[NV];
    for (int v = 0; v < NV; v++) y[v] = load_pairs(b + v * 2 * LANES);
#if defined(__AVX512BF16__)
#pragma GCC unroll 8
    for (int m = 0; m < MR; m++) {
        P16 x = set1_pair(a[m]);
        for (int v = 0; v < NV; v++) acc[m][v] = dot_pairs(acc[m][v], x, y[v]);
    }
#elif defined(__AVX2__)
    // dot_pairs in two passes, odd elements first, so that half as many right operands are live.
    __m256 left_half[NV], right_half[NV];
    for (int v = 0; v < NV; v++) { left_half[v] = odd8(y[v].a); right_half[v] = odd8(y[v].b); }
#pragma GCC unroll 8
    for (int m = 0; m < MR; m++) {
        __m256 x = odd8(set1_pair(a[m]).a);
        for (int v = 0; v < NV; v++)
            acc[m][v] = {_mm256_fmadd_ps(x, left_half[v], acc[m][v].a), _mm256_fmadd_ps(x, right_half[v], acc[m][v].b)};
    }
    for (int v = 0; v < NV; v++) { left_half[v] = even8(y[v].a); right_half[v] = even8(y[v].b); }
#pragma GCC unroll 8
    for (int m = 0; m < MR; m++) {
        __m256 x = even8(set1_pair(a[m]).a);
        for (int v = 0; v < NV; v++)
            acc[m][v] = {_mm256_fmadd_ps(x, left_half[v], acc[m][v].a), _mm256_fmadd_ps(x, right_half[v], acc[m][v].b)};
    }
#else
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

// c[MR][PANEL] (or from +0, where `start`) += `reduce` elements of MR rows of a times a panel's slice b. An odd BF16
// tail of a row-major left operand pairs with a zero. LINES cache lines of `ahead` are prefetched per step.
template <typename T, int MR, bool PACKED, int LINES>
static void tile(const T* a, int64_t lda, const T* b, float* c, int64_t reduce, bool start, const char* ahead) {
    constexpr int NV = tile_vectors(MR), PER = Storage<T>::PER_STEP;
    const int64_t whole = reduce / PER;
    for (int first = 0; first < PANEL / LANES; first += NV) {
        F16 acc[MR][NV];
        float* out = c + first * LANES;
        for (int m = 0; m < MR; m++)
            for (int v = 0; v < NV; v++) acc[m][v] = start ? zero() : load(out + m * PANEL + v * LANES);
        const T* line = b + first * LANES * PER;
        for (int64_t s = 0; s < whole; s++, line += PANEL * PER) {
            if (LINES && first == 0) prefetch_lines<LINES>(ahead, s);
            const T* x[MR];
            for (int m = 0; m < MR; m++) x[m] = left<T, PACKED>(a, lda, s, m);
            step<MR, NV>(acc, x, line);
        }
        if (whole * PER < reduce) {
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
            for (int v = 0; v < NV; v++) store(out + m * PANEL + v * LANES, acc[m][v]);
    }
}

template <typename T, bool PACKED, int LINES>
static inline void any_tile(int rows, const T* a, int64_t lda, const T* b, float* c, int64_t reduce, bool start, const char* ahead) {
    switch (rows) {
        case 1: return tile<T, 1, PACKED, LINES>(a, lda, b, c, reduce, start, ahead);
        case 2: return tile<T, 2, PACKED, LINES>(a, lda, b, c, reduce, start, ahead);
#if defined(__AVX2__) || defined(__aarch64__)
        case 3: return tile<T, 3, PACKED, LINES>(a, lda, b, c, reduce, start, ahead);
        case 4: return tile<T, 4, PACKED, LINES>(a, lda, b, c, reduce, start, ahead);
#endif
#if defined(__AVX2__)
        case 5: return tile<T, 5, PACKED, LINES>(a, lda, b, c, reduce, start, ahead);
        case 6: return tile<T, 6, PACKED, LINES>(a, lda, b, c, reduce, start, ahead);
#endif
        default: __builtin_trap();
    }
}

}  // namespace zg
