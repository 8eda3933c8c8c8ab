// Transposition of sixteen by sixteen 32-bit words, the step of every packing on AVX-512.
#pragma once
#include "simd.h"

namespace zg {

#if defined(__AVX512F__)
// r[i] holds row i before, column i after.
static inline void turn(__m512i (&r)[16]) {
    __m512i t[16], u[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)  // lane L of u[i + c] is now column 4 L + c of rows i .. i + 3
        for (int h = 0; h < 2; h++) {
            u[i + 2 * h] = _mm512_unpacklo_epi64(t[i + h], t[i + h + 2]);
            u[i + 2 * h + 1] = _mm512_unpackhi_epi64(t[i + h], t[i + h + 2]);
        }
    for (int c = 0; c < 4; c++) {
        const __m512i even_low = _mm512_shuffle_i32x4(u[c], u[4 + c], 0x88);
        const __m512i even_high = _mm512_shuffle_i32x4(u[8 + c], u[12 + c], 0x88);
        const __m512i odd_low = _mm512_shuffle_i32x4(u[c], u[4 + c], 0xdd);
        const __m512i odd_high = _mm512_shuffle_i32x4(u[8 + c], u[12 + c], 0xdd);
        r[c] = _mm512_shuffle_i32x4(even_low, even_high, 0x88);
        r[4 + c] = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
        r[8 + c] = _mm512_shuffle_i32x4(even_low, even_high, 0xdd);
        r[12 + c] = _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd);
    }
}
#endif

template <class T> static inline const uint32_t* words(const T* p) { return reinterpret_cast<const uint32_t*>(p); }
template <class T> static inline uint32_t* words(T* p) { return reinterpret_cast<uint32_t*>(p); }

// out[c][r] = in[r][c] for words of 32 bits, sixteen by sixteen.
static inline void transpose16(const uint32_t* in, int64_t in_stride, uint32_t* out, int64_t out_stride) {
#if defined(__AVX512F__)
    __m512i r[16], t[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(in + i * in_stride);
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {  // r[i + c]: in each 128-bit lane L column 4 L + c of rows i .. i + 3
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        const __m512i even_low = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88);
        const __m512i odd_low = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd);
        const __m512i even_high = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);
        const __m512i odd_high = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
        _mm512_storeu_si512(out + c * out_stride, _mm512_shuffle_i32x4(even_low, even_high, 0x88));
        _mm512_storeu_si512(out + (4 + c) * out_stride, _mm512_shuffle_i32x4(odd_low, odd_high, 0x88));
        _mm512_storeu_si512(out + (8 + c) * out_stride, _mm512_shuffle_i32x4(even_low, even_high, 0xdd));
        _mm512_storeu_si512(out + (12 + c) * out_stride, _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd));
    }
#else
    for (int64_t c = 0; c < 16; c++)
        for (int64_t r = 0; r < 16; r++) out[c * out_stride + r] = in[r * in_stride + c];
#endif
}

// The same for any matrix; rows are a multiple of sixteen. `stride` words from one row of `out` to the next, by default
// no more than it has.
static inline void transpose(const uint32_t* in, int64_t rows, int64_t cols, uint32_t* out, int64_t stride = 0) {
    const int64_t whole = cols / 16 * 16, step = stride ? stride : rows;
    for (int64_t r = 0; r < rows; r += 16, in += 16 * cols, out += 16) {
        for (int64_t c = 0; c < whole; c += 16) transpose16(in + c, cols, out + c * step, step);
        for (int64_t i = 0; i < 16; i++)
            for (int64_t c = whole; c < cols; c++) out[c * step + i] = in[i * cols + c];
    }
}

}  // namespace zg
