// Products of latent attention, in which rows of the cache are read as they stand: scores with keys as rows and query
// rows as lanes, values with query rows as rows and columns of the latent as lanes.
#pragma once
#include "mla.h"

namespace zg {
namespace {

// Accumulators held in registers; no bit depends on these.
#if defined(__AVX512F__)
constexpr int KEY_ROWS = 8, QUERY_LANES = 3, VALUE_ROWS = 8, VALUE_LANES = 2;
#elif defined(__AVX2__)
constexpr int KEY_ROWS = 4, QUERY_LANES = 1, VALUE_ROWS = 4, VALUE_LANES = 1;
#else
constexpr int KEY_ROWS = 4, QUERY_LANES = 1, VALUE_ROWS = 3, VALUE_LANES = 1;
#endif
static_assert(TILE_KEYS % KEY_ROWS == 0, "keys of a tile are taken KEY_ROWS at a time");

// Sixteen columns per vector of one step of values: for BF16 two keys side by side, `a` the even one.
template <int COLS> static inline __attribute__((always_inline)) void value_lanes(
    const float* a, const float*, F16 (&lanes)[COLS]) {
    for (int c = 0; c < COLS; c++) lanes[c] = load(a + c * LANES);
}
static inline P16 pair_lanes(const bf16* a, const bf16* b) {
#if defined(__AVX512BF16__)
    const __m512i even = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)a));
    const __m512i odd = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)b));
    return _mm512_or_si512(even, _mm512_slli_epi32(odd, 16));
#elif defined(__AVX2__)
    const __m256i even = _mm256_loadu_si256((const __m256i*)a), odd = _mm256_loadu_si256((const __m256i*)b);
    const __m256i low = _mm256_unpacklo_epi16(even, odd), high = _mm256_unpackhi_epi16(even, odd);
    return {_mm256_permute2x128_si256(low, high, 0x20), _mm256_permute2x128_si256(low, high, 0x31)};
#else
    P16 made;
    for (int i = 0; i < LANES; i++) made.v[i] = int32_t(uint32_t(a[i]) | uint32_t(b[i]) << 16);
    return made;
#endif
}
template <int COLS> static inline __attribute__((always_inline)) void value_lanes(
    const bf16* a, const bf16* b, P16 (&lanes)[COLS]) {
#if defined(__AVX512BF16__)
    if constexpr (COLS == 2) {
        alignas(64) static constexpr uint16_t ORDER[2][32] = {
            {0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39,
             8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
            {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
             24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63}};
        const __m512i even = _mm512_loadu_si512(a), odd = _mm512_loadu_si512(b);
        lanes[0] = _mm512_permutex2var_epi16(even, _mm512_load_si512(ORDER[0]), odd);
        lanes[1] = _mm512_permutex2var_epi16(even, _mm512_load_si512(ORDER[1]), odd);
        return;
    }
#endif
    for (int c = 0; c < COLS; c++) lanes[c] = pair_lanes(a + c * LANES, b + c * LANES);
}

// Where the rows of one block of keys are: of each sixteen keys the first latent and the first rotated part.
template <class T> struct BlockRows {
    const T *latent[BLOCK_KEYS / TILE_KEYS], *rope[BLOCK_KEYS / TILE_KEYS];
};

// acc[r][16 c + lane] += key r times query row, over `width` elements: one chain, ascending.
template <class T, int COLS> static inline __attribute__((always_inline)) void add_keys(
    F16 (&acc)[KEY_ROWS][COLS], const T* keys, int64_t key_stride, int64_t width, const T* queries, int64_t stride) {
    const T* columns[COLS];
    for (int c = 0; c < COLS; c++) columns[c] = queries + c * LANES * Step<T>::WIDTH;
    accumulate<T, KEY_ROWS, COLS>(acc, width / Step<T>::WIDTH, keys, key_stride, columns, stride);
}

}  // namespace
}  // namespace zg
