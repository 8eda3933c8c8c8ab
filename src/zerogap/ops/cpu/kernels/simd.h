// Sixteen FP32 lanes, the unit in which every order of this library is fixed: element i of a row stands in lane i % 16.
//
// One type, F16, on three instruction sets: AVX-512 (one register), AVX2 (two), and compiler vectors (portable). Only
// correctly rounded operations are offered: add, mul, div, sqrt, fma (two roundings on the portable build, which is a
// backend class of its own). Subnormals are zero everywhere: team.h sets flush-to-zero, conversions here do the same.
#pragma once
#include <cstdint>
#include <cstring>
#include <cmath>
#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace zg {

typedef uint16_t bf16;  // raw bits
constexpr int LANES = 16;

static inline int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline uint32_t bits_of(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
static inline float float_of(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }
static inline float bf16_to_float(bf16 x) { return float_of(uint32_t(x) << 16); }
// Round to nearest even; subnormal inputs become zero with their sign, NaN stays NaN (quiet).
static inline bf16 float_to_bf16(float x) {
    uint32_t u = bits_of(x), magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return bf16((u >> 16) | 0x40);
    if (magnitude < 0x00800000u) return bf16((u >> 16) & 0x8000u);
    return bf16((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}

#if defined(__AVX512F__)
// ------------------------------------------------------------------------------------------------ AVX-512
struct F16 { __m512 v; };
typedef __mmask16 M16;
static inline F16 set1(float x) { return {_mm512_set1_ps(x)}; }
static inline F16 zero() { return {_mm512_setzero_ps()}; }
static inline F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline void store(float* p, F16 a) { _mm512_storeu_ps(p, a.v); }
static inline M16 first_n(int64_t n) { return n >= 16 ? M16(0xffff) : n <= 0 ? M16(0) : M16((1u << n) - 1); }
static inline F16 load_n(const float* p, int64_t n) { return {_mm512_maskz_loadu_ps(first_n(n), p)}; }
static inline void store_n(float* p, F16 a, int64_t n) { _mm512_mask_storeu_ps(p, first_n(n), a.v); }
static inline F16 load(const bf16* p) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
static inline F16 load_n(const bf16* p, int64_t n) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first_n(n), p)), 16))};
}
static inline void store(bf16* p, F16 a) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(a.v)); }
static inline void store_n(bf16* p, F16 a, int64_t n) {
    _mm256_mask_storeu_epi16(p, first_n(n), (__m256i)_mm512_cvtneps_pbh(a.v));
}
static inline F16 operator+(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline F16 operator-(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline F16 operator*(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline F16 operator/(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
static inline F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
static inline F16 sqrt(F16 a) { return {_mm512_sqrt_ps(a.v)}; }
static inline F16 max(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
static inline F16 min(F16 a, F16 b) { return {_mm512_min_ps(a.v, b.v)}; }
static inline F16 abs(F16 a) { return {_mm512_abs_ps(a.v)}; }
static inline F16 negate(F16 a) { return {_mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32(int(0x80000000u))))}; }
static inline M16 less(F16 a, F16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ); }
static inline M16 greater_equal(F16 a, F16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }
static inline F16 select(M16 m, F16 yes, F16 no) { return {_mm512_mask_mov_ps(no.v, m, yes.v)}; }
static inline F16 round_even(F16 a) { return {_mm512_roundscale_ps(a.v, 0)}; }
// a * 2^n for whole n with a normal result
static inline F16 scale_pow2(F16 a, F16 n) { return {_mm512_scalef_ps(a.v, n.v)}; }
#elif defined(__AVX2__)
// ------------------------------------------------------------------------------------------------ AVX2 + FMA
struct F16 { __m256 a, b; };
struct M16 { __m256 a, b; };
static inline F16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline F16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void store(float* p, F16 x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
static inline M16 first_n(int64_t n) {
    __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), count = _mm256_set1_epi32(int(max_of(0, min_of(n, 16))));
    return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(count, lane)),
            _mm256_castsi256_ps(_mm256_cmpgt_epi32(count, _mm256_add_epi32(lane, _mm256_set1_epi32(8))))};
}
static inline F16 load_n(const float* p, int64_t n) {
    if (n >= 16) return load(p);
    float t[16] = {0}; for (int64_t i = 0; i < n; i++) t[i] = p[i]; return load(t);
}
static inline void store_n(float* p, F16 x, int64_t n) {
    if (n >= 16) return store(p, x);
    float t[16]; store(t, x); for (int64_t i = 0; i < n; i++) p[i] = t[i];
}
static inline __m256 widen8(const bf16* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
static inline F16 load(const bf16* p) { return {widen8(p), widen8(p + 8)}; }
static inline F16 load_n(const bf16* p, int64_t n) {
    if (n >= 16) return load(p);
    bf16 t[16] = {0}; for (int64_t i = 0; i < n; i++) t[i] = p[i]; return load(t);
}
static inline __m128i narrow8(__m256 x) {
    __m256i u = _mm256_castps_si256(x), magnitude = _mm256_and_si256(u, _mm256_set1_epi32(0x7fffffff));
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    __m256i r = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    __m256i sign = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(0x8000));
    __m256i tiny = _mm256_cmpgt_epi32(_mm256_set1_epi32(0x00800000), magnitude);
    __m256i nan = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7f800000));
    r = _mm256_blendv_epi8(r, sign, tiny);
    r = _mm256_blendv_epi8(r, _mm256_or_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(0x40)), nan);
    return _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
}
static inline void store(bf16* p, F16 x) { _mm_storeu_si128((__m128i*)p, narrow8(x.a)); _mm_storeu_si128((__m128i*)(p + 8), narrow8(x.b)); }
static inline void store_n(bf16* p, F16 x, int64_t n) {
    if (n >= 16) return store(p, x);
    bf16 t[16]; store(t, x); for (int64_t i = 0; i < n; i++) p[i] = t[i];
}
static inline F16 operator+(F16 x, F16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
static inline F16 operator-(F16 x, F16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
static inline F16 operator*(F16 x, F16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
static inline F16 operator/(F16 x, F16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
static inline F16 fma(F16 x, F16 y, F16 z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
static inline F16 sqrt(F16 x) { return {_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }
static inline F16 max(F16 x, F16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
static inline F16 min(F16 x, F16 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
static inline F16 abs(F16 x) { __m256 m = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff)); return {_mm256_and_ps(x.a, m), _mm256_and_ps(x.b, m)}; }
static inline F16 negate(F16 x) { __m256 s = _mm256_set1_ps(-0.0f); return {_mm256_xor_ps(x.a, s), _mm256_xor_ps(x.b, s)}; }
static inline M16 less(F16 x, F16 y) { return {_mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ)}; }
static inline M16 greater_equal(F16 x, F16 y) { return {_mm256_cmp_ps(x.a, y.a, _CMP_GE_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_GE_OQ)}; }
static inline F16 select(M16 m, F16 yes, F16 no) { return {_mm256_blendv_ps(no.a, yes.a, m.a), _mm256_blendv_ps(no.b, yes.b, m.b)}; }
static inline F16 round_even(F16 x) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
static inline __m256 pow2_8(__m256 n) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23)); }
static inline F16 scale_pow2(F16 x, F16 n) { return {_mm256_mul_ps(x.a, pow2_8(n.a)), _mm256_mul_ps(x.b, pow2_8(n.b))}; }
#else
// ------------------------------------------------------------------------------------------------ compiler vectors
typedef float V16 __attribute__((vector_size(64)));
typedef int32_t I16 __attribute__((vector_size(64)));
struct F16 { V16 v; };
struct M16 { I16 m; };
static inline F16 set1(float x) { return {x - (V16){}}; }
static inline F16 zero() { return {(V16){}}; }
static inline F16 load(const float* p) { F16 r; memcpy(&r.v, p, 64); return r; }
static inline void store(float* p, F16 a) { memcpy(p, &a.v, 64); }
static inline M16 first_n(int64_t n) {
    const I16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return {lane < int32_t(max_of(0, min_of(n, 16)))};
}
static inline F16 load_n(const float* p, int64_t n) {
    if (n >= 16) return load(p);
    F16 r = zero(); for (int64_t i = 0; i < n; i++) r.v[i] = p[i]; return r;
}
static inline void store_n(float* p, F16 a, int64_t n) { if (n >= 16) return store(p, a); for (int64_t i = 0; i < n; i++) p[i] = a.v[i]; }
static inline F16 load(const bf16* p) { I16 u; for (int i = 0; i < 16; i++) u[i] = int32_t(uint32_t(p[i]) << 16); return {(V16)u}; }
static inline F16 load_n(const bf16* p, int64_t n) {
    if (n >= 16) return load(p);
    I16 u = {}; for (int64_t i = 0; i < n; i++) u[i] = int32_t(uint32_t(p[i]) << 16); return {(V16)u};
}
static inline void store(bf16* p, F16 a) { float t[16]; store(t, a); for (int i = 0; i < 16; i++) p[i] = float_to_bf16(t[i]); }
static inline void store_n(bf16* p, F16 a, int64_t n) { float t[16]; store(t, a); for (int64_t i = 0; i < min_of(n, 16); i++) p[i] = float_to_bf16(t[i]); }
static inline F16 operator+(F16 a, F16 b) { return {a.v + b.v}; }
static inline F16 operator-(F16 a, F16 b) { return {a.v - b.v}; }
static inline F16 operator*(F16 a, F16 b) { return {a.v * b.v}; }
static inline F16 operator/(F16 a, F16 b) { return {a.v / b.v}; }
static inline F16 fma(F16 a, F16 b, F16 c) { return {a.v * b.v + c.v}; }  // two roundings: this backend class's own primitive
static inline F16 sqrt(F16 a) { F16 r; for (int i = 0; i < 16; i++) r.v[i] = __builtin_sqrtf(a.v[i]); return r; }
static inline F16 select(M16 m, F16 yes, F16 no) { return {(V16)((m.m & (I16)yes.v) | (~m.m & (I16)no.v))}; }
static inline M16 less(F16 a, F16 b) { return {a.v < b.v}; }
static inline M16 greater_equal(F16 a, F16 b) { return {a.v >= b.v}; }
static inline F16 max(F16 a, F16 b) { return select({a.v > b.v}, a, b); }  // like maxps: b where unordered
static inline F16 min(F16 a, F16 b) { return select({a.v < b.v}, a, b); }
static inline F16 abs(F16 a) { return {(V16)((I16)a.v & 0x7fffffff)}; }
static inline F16 negate(F16 a) { return {(V16)((I16)a.v ^ int32_t(0x80000000u))}; }
static inline F16 round_even(F16 a) {  // |a| < 2^22, which is all that exp and log need
    const float magic = 12582912.0f;
    V16 r = (a.v + magic) - magic; return {r};
}
static inline F16 scale_pow2(F16 a, F16 n) { I16 e; for (int i = 0; i < 16; i++) e[i] = (int32_t(n.v[i]) + 127) << 23; return {a.v * (V16)e}; }
#endif

static inline void store_one(float* p, float x) { *p = x; }
static inline void store_one(bf16* p, float x) { *p = float_to_bf16(x); }
static inline float load_one(const float* p) { return *p; }
static inline float load_one(const bf16* p) { return bf16_to_float(*p); }

// Sum and maximum of the sixteen lanes by the halving tree: (i, i + 8), (i, i + 4), (i, i + 2), (i, i + 1).
#if defined(__AVX2__) || defined(__AVX512F__)
#if defined(__AVX512F__)
static inline __m256 low_half(F16 a) { return _mm512_castps512_ps256(a.v); }
static inline __m256 high_half(F16 a) { return _mm512_extractf32x8_ps(a.v, 1); }
#else
static inline __m256 low_half(F16 x) { return x.a; }
static inline __m256 high_half(F16 x) { return x.b; }
#endif
static inline float lane_sum(F16 a) {
    const __m256 eight = _mm256_add_ps(low_half(a), high_half(a));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
static inline float lane_max(F16 a) {
    const __m256 eight = _mm256_max_ps(low_half(a), high_half(a));
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
#else
static inline float lane_sum(F16 a) {
    float t[16]; store(t, a);
    for (int half = 8; half; half /= 2) for (int i = 0; i < half; i++) t[i] = t[i] + t[i + half];
    return t[0];
}
static inline float lane_max(F16 a) {
    float t[16]; store(t, a);
    for (int half = 8; half; half /= 2) for (int i = 0; i < half; i++) t[i] = t[i] > t[i + half] ? t[i] : t[i + half];
    return t[0];
}
#endif

// ------------------------------------------------------------------------------------------------ exp and log
// exp for x <= 88; below -87.33654 the result is +0. exp(0) = 1 exactly. Cody-Waite reduction and a degree-7 polynomial
// (coefficients of the Cephes library's expf); error below 1e-7 relative. NaN in gives NaN out.
static inline F16 exp(F16 x) {
    const F16 lowest = set1(-87.33654f);
    M16 dead = less(x, lowest);
    F16 y = select(dead, lowest, x);
    F16 n = round_even(y * set1(1.44269504f));
    F16 r = fma(n, set1(-0.693359375f), y);
    r = fma(n, set1(2.12194440e-4f), r);
    F16 p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = fma(r * r, p, r + set1(1.0f));
    return select(dead, zero(), scale_pow2(p, n));
}
static inline float exp_one(float x) { float t[16]; store(t, exp(set1(x))); return t[0]; }

// log of one positive normal number (Cephes logf): exponent split at sqrt(1/2), degree-9 polynomial. log(1) = 0 exactly.
static inline float log_one(float x) {
    if (!(x > 0)) return x == 0 ? -HUGE_VALF : NAN;
    if (x == HUGE_VALF) return x;
    uint32_t u = bits_of(x);
    int e = int(u >> 23) - 126;
    float m = float_of((u & 0x007fffffu) | 0x3f000000u);  // in [0.5, 1)
    if (m < 0.707106781186547524f) { e -= 1; m = m + m - 1.0f; } else { m = m - 1.0f; }
    const F16 r = set1(m), z = r * r;
    F16 p = set1(7.0376836292e-2f);
    p = fma(p, r, set1(-1.1514610310e-1f));
    p = fma(p, r, set1(1.1676998740e-1f));
    p = fma(p, r, set1(-1.2420140846e-1f));
    p = fma(p, r, set1(1.4249322787e-1f));
    p = fma(p, r, set1(-1.6668057665e-1f));
    p = fma(p, r, set1(2.0000714765e-1f));
    p = fma(p, r, set1(-2.4999993993e-1f));
    p = fma(p, r, set1(3.3333331174e-1f));
    F16 y = p * r * z;
    const F16 fe = set1(float(e));
    y = fma(fe, set1(-2.12194440e-4f), y);
    y = fma(set1(-0.5f), z, y);
    F16 s = fma(fe, set1(0.693359375f), r + y);
    float t[16]; store(t, s); return t[0];
}

// ------------------------------------------------------------------------------------------------ BF16 pair products
// A pair is two consecutive elements k, k + 1 of the reduced axis (k even) in one 32-bit word, element k in the low half.
// dot_pairs: lane-wise acc = (acc + a[k+1] * b[k+1]) + a[k] * b[k]; products of BF16 are exact in FP32, odd element first.
#if defined(__AVX512BF16__)
typedef __m512i P16;
static inline P16 load_pairs(const bf16* p) { return _mm512_loadu_si512(p); }  // 16 pairs, 64 bytes
static inline P16 set1_pair(const bf16* p) { int32_t w; memcpy(&w, p, 4); return _mm512_set1_epi32(w); }
static inline F16 dot_pairs(F16 acc, P16 a, P16 b) { return {_mm512_dpbf16_ps(acc.v, (__m512bh)a, (__m512bh)b)}; }
#elif defined(__AVX2__)
struct P16 { __m256i a, b; };
static inline P16 load_pairs(const bf16* p) { return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 16))}; }
static inline P16 set1_pair(const bf16* p) { int32_t w; memcpy(&w, p, 4); return {_mm256_set1_epi32(w), _mm256_set1_epi32(w)}; }
static inline __m256 odd8(__m256i x) { return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(int(0xffff0000u)))); }
static inline __m256 even8(__m256i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
static inline F16 dot_pairs(F16 acc, P16 x, P16 y) {
    F16 r = {_mm256_fmadd_ps(odd8(x.a), odd8(y.a), acc.a), _mm256_fmadd_ps(odd8(x.b), odd8(y.b), acc.b)};
    return {_mm256_fmadd_ps(even8(x.a), even8(y.a), r.a), _mm256_fmadd_ps(even8(x.b), even8(y.b), r.b)};
}
#else
struct P16 { I16 v; };
static inline P16 load_pairs(const bf16* p) { P16 r; memcpy(&r.v, p, 64); return r; }
static inline P16 set1_pair(const bf16* p) { int32_t w; memcpy(&w, p, 4); return {w - (I16){}}; }
static inline F16 dot_pairs(F16 acc, P16 x, P16 y) {
    V16 r = acc.v + (V16)(x.v & int32_t(0xffff0000u)) * (V16)(y.v & int32_t(0xffff0000u));
    return {r + (V16)(x.v << 16) * (V16)(y.v << 16)};
}
#endif

}  // namespace zg
