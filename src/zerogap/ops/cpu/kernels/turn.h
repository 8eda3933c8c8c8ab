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

}  // namespace zg
