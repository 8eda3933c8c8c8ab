// E4M3 (OCP 8-bit floating point, "E4M3FN"): sign, four exponent bits (bias 7), three mantissa bits; no infinity, 0x7f
// is NaN, largest 448, subnormals in steps of 2^-9. The same bits on every instruction set (docs/numerics.md, "FP8").
//
// A *grid value* is an E4M3 value held as FP32 or BF16; both hold it exactly. A *code* is its byte.
#pragma once
#include "simd.h"

namespace zg {

constexpr float E4M3_MAX = 448.0f;
constexpr float E4M3_ZERO_BELOW = 0x1p-100f;  // a block whose largest magnitude is below this counts as zero

// The scale of a block from the largest magnitude in it: fl32(amax / 448), or that rounded up to a power of two; 1 for a
// block that counts as zero; NaN where amax is not finite, so that nothing computed from the block can pass for a number.
static inline float block_scale(float amax, bool pow2) {
    if ((bits_of(amax) & 0x7fffffffu) >= 0x7f800000u) return float_of(0x7fc00000u);
    if (amax < E4M3_ZERO_BELOW) return 1.0f;
    const float scale = amax / E4M3_MAX;
    if (!pow2) return scale;
    const uint32_t u = bits_of(scale);
    return float_of(u & 0x7fffffu ? (u & 0x7f800000u) + 0x00800000u : u);
}

// Integer views of lanes. `larger_magnitude` compares bits, so that a NaN is larger than every number and is never lost
// (maxps would lose it); over any grouping of elements the result is the same.
#if defined(__AVX512F__)
typedef __m512i I16x;
static inline I16x as_int(F16 a) { return _mm512_castps_si512(a.v); }
static inline F16 as_float(I16x a) { return {_mm512_castsi512_ps(a)}; }
static inline I16x set1_int(int32_t x) { return _mm512_set1_epi32(x); }
static inline I16x add_int(I16x a, I16x b) { return _mm512_add_epi32(a, b); }
static inline I16x sub_int(I16x a, I16x b) { return _mm512_sub_epi32(a, b); }
static inline I16x and_int(I16x a, I16x b) { return _mm512_and_si512(a, b); }
static inline I16x or_int(I16x a, I16x b) { return _mm512_or_si512(a, b); }
static inline I16x min_unsigned(I16x a, I16x b) { return _mm512_min_epu32(a, b); }
static inline I16x max_unsigned(I16x a, I16x b) { return _mm512_max_epu32(a, b); }
template <int N> static inline I16x shift_left(I16x a) { return _mm512_slli_epi32(a, N); }
template <int N> static inline I16x shift_right(I16x a) { return _mm512_srli_epi32(a, N); }
static inline void store_bytes(uint8_t* p, I16x a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(a)); }
static inline I16x load_bytes(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
#elif defined(__AVX2__)
struct I16x { __m256i a, b; };
static inline I16x as_int(F16 x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
static inline F16 as_float(I16x x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
static inline I16x set1_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
static inline I16x add_int(I16x x, I16x y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
static inline I16x sub_int(I16x x, I16x y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
static inline I16x and_int(I16x x, I16x y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
static inline I16x or_int(I16x x, I16x y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
static inline I16x min_unsigned(I16x x, I16x y) { return {_mm256_min_epu32(x.a, y.a), _mm256_min_epu32(x.b, y.b)}; }
static inline I16x max_unsigned(I16x x, I16x y) { return {_mm256_max_epu32(x.a, y.a), _mm256_max_epu32(x.b, y.b)}; }
template <int N> static inline I16x shift_left(I16x x) { return {_mm256_slli_epi32(x.a, N), _mm256_slli_epi32(x.b, N)}; }
template <int N> static inline I16x shift_right(I16x x) { return {_mm256_srli_epi32(x.a, N), _mm256_srli_epi32(x.b, N)}; }
static inline void store_bytes(uint8_t* p, I16x x) {  // values 0 .. 255
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(x.a, x.b), 0xd8);
    _mm_storeu_si128((__m128i*)p, _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}
static inline I16x load_bytes(const uint8_t* p) {
    return {_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)), _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))};
}
#else
typedef uint32_t U16 __attribute__((vector_size(64)));
struct I16x { U16 v; };
static inline I16x as_int(F16 a) { return {(U16)a.v}; }
static inline F16 as_float(I16x a) { return {(V16)a.v}; }
static inline I16x set1_int(int32_t x) { return {uint32_t(x) - (U16){}}; }
static inline I16x add_int(I16x a, I16x b) { return {a.v + b.v}; }
static inline I16x sub_int(I16x a, I16x b) { return {a.v - b.v}; }
static inline I16x and_int(I16x a, I16x b) { return {a.v & b.v}; }
static inline I16x or_int(I16x a, I16x b) { return {a.v | b.v}; }
static inline I16x min_unsigned(I16x a, I16x b) { const U16 m = (U16)(a.v < b.v); return {(a.v & m) | (b.v & ~m)}; }
static inline I16x max_unsigned(I16x a, I16x b) { const U16 m = (U16)(a.v > b.v); return {(a.v & m) | (b.v & ~m)}; }
template <int N> static inline I16x shift_left(I16x a) { return {a.v << N}; }
template <int N> static inline I16x shift_right(I16x a) { return {a.v >> N}; }
static inline void store_bytes(uint8_t* p, I16x a) { for (int i = 0; i < 16; i++) p[i] = uint8_t(a.v[i]); }
static inline I16x load_bytes(const uint8_t* p) { I16x r; for (int i = 0; i < 16; i++) r.v[i] = p[i]; return r; }
#endif
static inline I16x magnitude_bits(F16 a) { return and_int(as_int(a), set1_int(0x7fffffff)); }
static inline F16 larger_magnitude(F16 largest, F16 x) { return as_float(max_unsigned(as_int(largest), magnitude_bits(x))); }
static inline float lane_largest(F16 magnitudes) {  // the largest of sixteen values >= +0; NaN wins
    float t[16];
    store(t, magnitudes);
    uint32_t largest = 0;
    for (int i = 0; i < 16; i++) largest = bits_of(t[i]) > largest ? bits_of(t[i]) : largest;
    return float_of(largest);
}

// The largest magnitude of `count` BF16 values; NaN wins. Their order is the order of their bits, so the maximum is taken of
// integers.
static inline float block_amax(const bf16* x, int64_t count) {
    uint32_t largest = 0;
    int64_t i = 0;
#if defined(__AVX512F__)
    __m512i most = _mm512_setzero_si512();
    const __m512i number = _mm512_set1_epi16(0x7fff);
    for (; i + 32 <= count; i += 32) most = _mm512_max_epu16(most, _mm512_and_si512(_mm512_loadu_si512(x + i), number));
    if (i < count) {
        const __mmask32 rest = __mmask32((uint64_t(1) << (count - i)) - 1);
        most = _mm512_max_epu16(most, _mm512_and_si512(_mm512_maskz_loadu_epi16(rest, x + i), number));
    }
    const __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(most), _mm512_extracti64x4_epi64(most, 1));
    const __m128i eight = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    largest = 0xffff - (_mm_cvtsi128_si32(_mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi16(-1)))) & 0xffff);
#else
#if defined(__AVX2__)
    __m256i most = _mm256_setzero_si256();
    for (; i + 16 <= count; i += 16)
        most = _mm256_max_epu16(most, _mm256_and_si256(_mm256_loadu_si256((const __m256i*)(x + i)), _mm256_set1_epi16(0x7fff)));
    const __m128i eight = _mm_max_epu16(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    largest = 0xffff - (_mm_cvtsi128_si32(_mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi16(-1)))) & 0xffff);
#endif
    for (const bf16 *p = x + i, *end = x + count; p < end; p++) {
        const uint32_t u = *p & 0x7fffu;
        largest = u > largest ? u : largest;
    }
#endif
    return float_of(largest << 16);
}

// fl32(x / scale) for many BF16 values x of one block (|x| at most about 448 scale). Where products are fused, the quotient by the reciprocal is
// corrected by its exact remainder, which is the same number as the division's for every BF16 x and every scale of a BF16
// block (tests/ops/test_quant.py tries all mantissas) as long as the remainder is no subnormal.
struct Quotient {
    F16 scale, negative_inverse;
    bool corrected;

    explicit Quotient(float s) : scale(set1(s)), negative_inverse(set1(-1.0f / s)) {
#if defined(__AVX2__)
        corrected = s >= 0x1p-60f && s <= 0x1p120f;
#else
        corrected = false;
#endif
    }
    F16 operator()(F16 x) const {
        if (!corrected) return x / scale;
        const F16 q = x * negative_inverse;  // -x / scale: with this sign, zeros end with that of x
        return negate(fma(fma(q, scale, x), negative_inverse, q));
    }
};

// ------------------------------------------------------------------------------------------------ FP32 to E4M3
// |y|, at most 448, plus 2^20 times its power of two (that of 2^-6 below it): the sum's last place is the grid's step,
// so the addition itself rounds to the grid, to nearest even, subnormals included.
struct Shifted { F16 sum, offset; };
static inline Shifted shift_to_grid(F16 y) {
    const F16 magnitude = min(set1(E4M3_MAX), abs(y));  // NaN stays: min and max return their second operand there
    const I16x power = and_int(as_int(max(set1(0x1p-6f), magnitude)), set1_int(0x7f800000));
    const F16 offset = as_float(add_int(power, set1_int(20 << 23)));
    return {magnitude + offset, offset};
}
static inline F16 grid_of(Shifted s, F16 y) {
    return as_float(or_int(as_int(s.sum - s.offset), and_int(as_int(y), set1_int(int32_t(0x80000000u)))));
}
// The step count over 2^-6's binade is the code: eight codes to each binade.
static inline I16x codes_of(Shifted s, F16 y) {
    const I16x offset = as_int(s.offset), steps = sub_int(as_int(s.sum), offset);
    const I16x code = add_int(steps, sub_int(shift_right<20>(offset), set1_int((121 + 20) << 3)));
    const I16x sign = and_int(shift_right<24>(as_int(y)), set1_int(0x80));
    return or_int(min_unsigned(code, set1_int(0x7f)), sign);  // a NaN's sum is far above
}

// FP32 lanes to grid values as FP32 lanes: to nearest even, saturating at +-448, signed zeros kept, NaN stays NaN.
static inline F16 round_e4m3(F16 y) { return grid_of(shift_to_grid(y), y); }
// FP32 lanes to sixteen codes with the same rounding (grid values are their own rounding); NaN becomes 0x7f or 0xff.
static inline void encode(uint8_t* p, F16 y) { store_bytes(p, codes_of(shift_to_grid(y), y)); }
static inline void encode_n(uint8_t* p, F16 y, int64_t n) {
    if (n >= LANES) return encode(p, y);
    uint8_t t[16];
    encode(t, y);
    for (int64_t i = 0; i < n; i++) p[i] = t[i];
}
static inline uint8_t encode_one(float y) { uint8_t t[16]; encode(t, set1(y)); return t[0]; }

// ------------------------------------------------------------------------------------------------ E4M3 to grid values
static inline F16 decode_lanes(I16x codes) {
    const I16x number = and_int(codes, set1_int(0x7f));
    const F16 normal = as_float(add_int(shift_left<20>(number), set1_int(120 << 23)));
    const F16 small = as_float(add_int(shift_left<20>(number), set1_int(121 << 23))) - set1(0x1p-6f);
    const F16 limit = as_float(set1_int(int32_t((0x7fu << 20) + (120u << 23))));  // what 0x7f would be as a number: 480
    F16 value = select(less(normal, set1(0x1p-6f)), small, normal);
    value = select(greater_equal(value, limit), as_float(set1_int(0x7fc00000)), value);
    return as_float(or_int(as_int(value), shift_left<24>(and_int(codes, set1_int(0x80)))));
}
// Sixteen codes to grid values in FP32 lanes.
static inline F16 decode(const uint8_t* p) { return decode_lanes(load_bytes(p)); }
static inline F16 decode_n(const uint8_t* p, int64_t n) {  // missing codes are +0
    if (n >= LANES) return decode(p);
    uint8_t t[16] = {0};
    for (int64_t i = 0; i < n; i++) t[i] = p[i];
    return decode(t);
}
static inline float decode_one(uint8_t code) {
    const uint32_t number = code & 0x7f, sign = uint32_t(code & 0x80) << 24;
    if (number == 0x7f) return float_of(0x7fc00000u | sign);
    if (number < 8) return float_of(bits_of(float(number) * 0x1p-9f) | sign);
    return float_of(((number << 20) + (120u << 23)) | sign);
}
// Sixteen codes to BF16 grid values.
static inline void decode16(const uint8_t* p, bf16* out) { store(out, decode(p)); }
// `count` codes to BF16 grid values, in order.
static inline void decode_row(const uint8_t* p, bf16* out, int64_t count) {
    int64_t i = 0;
#if defined(__AVX512F__)
    const __m512i small = _mm512_castsi128_si512(_mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
    for (; i + 32 <= count; i += 32) {
        const __m512i code = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)(p + i)));
        const __m512i number = _mm512_and_si512(code, _mm512_set1_epi16(0x7f));
        __m512i value = _mm512_add_epi16(_mm512_slli_epi16(number, 4), _mm512_set1_epi16(120 << 7));
        value = _mm512_mask_permutexvar_epi16(value, _mm512_cmplt_epu16_mask(number, _mm512_set1_epi16(8)), number, small);
        value = _mm512_mask_mov_epi16(value, _mm512_cmpeq_epi16_mask(number, _mm512_set1_epi16(0x7f)), _mm512_set1_epi16(0x7fc0));
        const __m512i sign = _mm512_slli_epi16(_mm512_and_si512(code, _mm512_set1_epi16(0x80)), 8);
        _mm512_storeu_si512(out + i, _mm512_or_si512(value, sign));
    }
#endif
    for (; i + LANES <= count; i += LANES) decode16(p + i, out + i);
    if (i < count) store_n(out + i, decode_n(p + i, count - i), count - i);
}

#if defined(__AVX512VBMI__)
// 64 codes to BF16 in a few instructions: both bytes of a grid value are looked up by the code's low seven bits.
struct Decoder {
    __m512i low0, low1, high0, high1;  // low and high bytes of the values of codes 0 .. 63 and 64 .. 127

    Decoder() {
        alignas(64) uint8_t low[128], high[128];
        for (int c = 0; c < 128; c++) {
            const bf16 value = bf16(bits_of(decode_one(uint8_t(c))) >> 16);
            low[c] = uint8_t(value);
            high[c] = uint8_t(value >> 8);
        }
        low0 = _mm512_load_si512(low), low1 = _mm512_load_si512(low + 64);
        high0 = _mm512_load_si512(high), high1 = _mm512_load_si512(high + 64);
    }
    // Of each 16-byte lane of `codes`, bytes 0 .. 7 become the eight BF16 of that lane of `first`, bytes 8 .. 15 of `second`.
    inline __attribute__((always_inline)) void pair(__m512i codes, __m512i& first, __m512i& second) const {
        const __m512i low = _mm512_permutex2var_epi8(low0, codes, low1);
        const __m512i unsigned_high = _mm512_permutex2var_epi8(high0, codes, high1);
        // high | (codes & 0x80)
        const __m512i high = _mm512_ternarylogic_epi32(unsigned_high, codes, _mm512_set1_epi8(int8_t(0x80)), 0xf8);
        first = _mm512_unpacklo_epi8(low, high);
        second = _mm512_unpackhi_epi8(low, high);
    }
};
#endif

}  // namespace zg
