// What log-probs, kept sets, sampling and the gradient share: the walk over a row's vocabulary in chunks of 64 ids, with
// tempered values, kept words and integer masses. Leaves start at multiples of 64, so a chunk never straddles two and
// lane = id % 16 holds everywhere.
#pragma once
#include <type_traits>
#include "logprob.h"

namespace zg {

constexpr int CHUNK = 64;
constexpr float MASS_UNIT = 1099511627776.0f;  // 2^40

// ---- masks as bits

#if defined(__AVX512F__)
static inline uint32_t mask_bits(M16 m) { return m; }
static inline M16 mask_of(uint32_t bits) { return M16(bits); }
#elif defined(__AVX2__)
static inline uint32_t mask_bits(M16 m) { return uint32_t(_mm256_movemask_ps(m.a)) | uint32_t(_mm256_movemask_ps(m.b)) << 8; }
static inline M16 mask_of(uint32_t bits) {
    const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128), word = _mm256_set1_epi32(int(bits));
    const __m256i high = _mm256_slli_epi32(bit, 8);
    return {_mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(word, bit), bit)),
            _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(word, high), high))};
}
#else
static inline uint32_t mask_bits(M16 m) { uint32_t r = 0; for (int i = 0; i < 16; i++) r |= uint32_t(m.m[i] & 1) << i; return r; }
static inline M16 mask_of(uint32_t bits) { M16 r; for (int i = 0; i < 16; i++) r.m[i] = -int32_t(bits >> i & 1); return r; }
#endif

// ---- masses: round(2^40 e) to the nearest integer, ties to even, in sixteen 64-bit lanes

#if defined(__AVX512DQ__)
struct L16 { __m512i a, b; };
static inline L16 no_mass() { return {_mm512_setzero_si512(), _mm512_setzero_si512()}; }
static inline L16 mass_of(F16 e) {
    const __m512 x = (e * set1(MASS_UNIT)).v;
    return {_mm512_cvtps_epi64(_mm512_castps512_ps256(x)), _mm512_cvtps_epi64(_mm512_extractf32x8_ps(x, 1))};
}
static inline L16 operator+(L16 x, L16 y) { return {_mm512_add_epi64(x.a, y.a), _mm512_add_epi64(x.b, y.b)}; }
static inline void store(int64_t* p, L16 x) { _mm512_storeu_si512(p, x.a); _mm512_storeu_si512(p + 8, x.b); }
#else
struct L16 { int64_t v[16]; };
static inline L16 no_mass() { return {}; }
static inline L16 mass_of(F16 e) {
    const double magic = 6755399441055744.0;  // 1.5 * 2^52: the addition rounds to an integer, which stands in the low bits
    float t[16]; store(t, e * set1(MASS_UNIT));
    L16 r;
    for (int i = 0; i < 16; i++) {
        const double d = double(t[i]) + magic;
        int64_t u, m; memcpy(&u, &d, 8); memcpy(&m, &magic, 8);
        r.v[i] = u - m;
    }
    return r;
}
static inline L16 operator+(L16 x, L16 y) { L16 r; for (int i = 0; i < 16; i++) r.v[i] = x.v[i] + y.v[i]; return r; }
static inline void store(int64_t* p, L16 x) { memcpy(p, x.v, sizeof(x.v)); }
#endif
static inline int64_t total_of(L16 x) { int64_t t[16], s = 0; store(t, x); for (int i = 0; i < 16; i++) s += t[i]; return s; }

// ---- rows

struct Row {
    float t;      // divisor: the temperature, or 1
    float max;    // largest y over the row (over the given kept ids)
    bool greedy, filtered;
    bool finite;  // false where a logit, or the largest tempered one, is NaN or infinite
};

static inline int64_t num_leaves(const VocabularyRows& v) { return ceil_div(v.vocab, v.leaf_size); }
static inline int64_t num_words(int64_t vocab) { return ceil_div(vocab, CHUNK); }

static inline bool is_filtered(const VocabularyRows& v, int64_t r) {
    return v.temperature[r] != 0.0f && ((v.top_k[r] > 0 && v.top_k[r] < v.vocab) || v.top_p[r] < 1.0f || v.min_p[r] > 0.0f);
}

// Combines the first phase's leaf states; every thread that needs a row's head computes it anew (eight numbers).
// fl(z / t) is monotone in z, so the largest quotient is the quotient of the largest logit; + 0 makes -0 a +0.
static inline Row row_head(const VocabularyRows& v, int64_t r) {
    const int64_t leaves = num_leaves(v);
    const LeafState* leaf = v.leaves + r * leaves;
    float max = leaf[0].max, poison = leaf[0].poison;
    for (int64_t i = 1; i < leaves; i++) {
        max = leaf[i].max > max ? leaf[i].max : max;
        poison = poison + leaf[i].poison;
    }
    Row row;
    row.greedy = v.temperature[r] == 0.0f;
    row.t = row.greedy ? 1.0f : v.temperature[r];
    row.max = max / row.t + 0.0f;
    row.filtered = is_filtered(v, r);
    row.finite = poison == 0.0f && row.max > -HUGE_VALF && row.max < HUGE_VALF;
    return row;
}

// y = z / t + 0: FP32 division, -0 and subnormals become +0. A divisor of one is skipped (same value).
template <bool DIVIDE>
static inline F16 tempered(const float* z, int64_t n, F16 t) {
    F16 y = n >= LANES ? load(z) : load_n(z, n);
    if (DIVIDE) y = y / t;
    return y + zero();
}

// The four vectors of one chunk; `n` valid ids, missing ones are zeros.
struct Chunk { F16 y[4]; };
template <bool DIVIDE>
static inline Chunk load_chunk(const float* z, int64_t n, F16 t) {
    if (n >= CHUNK) return {{tempered<DIVIDE>(z, 16, t), tempered<DIVIDE>(z + 16, 16, t), tempered<DIVIDE>(z + 32, 16, t), tempered<DIVIDE>(z + 48, 16, t)}};
    Chunk c;
    for (int q = 0; q < 4; q++) c.y[q] = n > 16 * q ? tempered<DIVIDE>(z + 16 * q, n - 16 * q, t) : zero();
    return c;
}

static inline uint64_t first_bits(int64_t n) { return n >= 64 ? ~uint64_t(0) : n <= 0 ? 0 : (uint64_t(1) << n) - 1; }

// Kept ids of the chunk at `first`, before the test on exp(y - max).
template <int KIND>
static inline uint64_t kept_word(const Chunk& c, int64_t first, int64_t n, const KeptRule& rule, const uint64_t* bits) {
    const uint64_t valid = first_bits(n);
    if (KIND == KEEP_ALL) return valid;
    if (KIND == KEEP_BITS) return bits[first / CHUNK] & valid;
    const F16 cut = set1(rule.cut);
    uint64_t above = 0, ties = 0;
    for (int q = 0; q < 4; q++) {
        const uint32_t greater = mask_bits(less(cut, c.y[q]));
        above |= uint64_t(greater) << (16 * q);
        ties |= uint64_t(mask_bits(greater_equal(c.y[q], cut)) & ~greater) << (16 * q);
    }
    return (above | (ties & first_bits(rule.last + 1 - first))) & valid;
}

// Digest of a set of ids: the sum modulo 2^64, over its non-zero 64-bit words, of the word mixed with its index
// (finaliser of splitmix64). It depends on the ids only, so leaves may add theirs in any order.
static inline uint64_t word_digest(uint64_t word, int64_t index) {
    uint64_t x = word ^ (uint64_t(index + 1) * 0x9E3779B97F4A7C15u);
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

// Calls f(kind, divide) with compile-time constants.
template <class F>
static inline void with_constants(int32_t kind, bool divide, F f) {
    typedef std::integral_constant<int, KEEP_ALL> All;
    typedef std::integral_constant<int, KEEP_RULE> Rule;
    typedef std::integral_constant<int, KEEP_BITS> Bits;
    if (kind == KEEP_ALL) { if (divide) f(All(), std::true_type()); else f(All(), std::false_type()); }
    else if (kind == KEEP_RULE) { if (divide) f(Rule(), std::true_type()); else f(Rule(), std::false_type()); }
    else { if (divide) f(Bits(), std::true_type()); else f(Bits(), std::false_type()); }
}

// Leaf maxima, kept rules and leaf sums of all rows (phases 0, 1, 2, with a barrier after each).
template <bool MASS>
void vocabulary_sums(int64_t rows, const VocabularyRows& v, Team& team);
extern template void vocabulary_sums<true>(int64_t, const VocabularyRows&, Team&);
extern template void vocabulary_sums<false>(int64_t, const VocabularyRows&, Team&);

// Combines the leaves of one row by the tree and writes logp of `target`, entropy, count and digest.
// A row that is not finite gets NaN, NaN, 0, 0. Returns the row's sum.
float finish_row(const VocabularyRows& v, int64_t r, const Row& row, int64_t target);

// The kept rule of a finite, filtered row: top-k, then top-p, then min-p.
KeptRule find_rule(const VocabularyRows& v, int64_t r, const Row& row, Team& team);

}  // namespace zg
