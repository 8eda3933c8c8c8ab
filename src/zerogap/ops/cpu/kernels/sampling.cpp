// The kept set by threshold search, and the draw. Masses are integers, so that their order is free; the draw depends on
// the row's logits, parameters and key only.
#include "sampling.h"
#include "philox.h"
#include "vocabulary.h"

namespace zg {
namespace {

typedef unsigned __int128 uint128;
constexpr int BUCKETS = 2048;
constexpr float BUCKETS_PER_UNIT = 64.0f;  // first level: buckets of 1/64 in y, 32 in all; what is farther shares the last

// Unsigned key that ascends with a finite y (never -0), and its inverse.
inline uint32_t key_of(float y) { uint32_t u = bits_of(y); return u & 0x80000000u ? ~u : u | 0x80000000u; }
inline float value_of(uint32_t key) { return float_of(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

// ceil(p * total) in exact arithmetic; 0 < p <= 1, 0 < total < 2^63.
int64_t ceil_share(float p, int64_t total) {
    const uint32_t u = bits_of(p), exponent = u >> 23 & 0xff;
    const uint64_t mantissa = (u & 0x7fffffu) | (exponent ? 0x800000u : 0);
    const int shift = 150 - int(exponent ? exponent : 1);  // p = mantissa * 2^-shift
    if (shift >= 100) return 1;
    const uint128 product = uint128(mantissa) * uint64_t(total);
    return int64_t((product + (uint128(1) << shift) - 1) >> shift);
}

inline int64_t mass_of_one(float e) { int64_t t[16]; store(t, mass_of(set1(e))); return t[0]; }

// The least e in [0, 1] with round(2^40 e) >= mass, so that a mass can be tested on e itself. Non-negative floats ascend
// with their bits.
float least_with_mass(int64_t mass) {
    uint32_t low = 0, high = bits_of(1.0f);
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        if (mass_of_one(float_of(middle)) >= mass) high = middle; else low = middle + 1;
    }
    return float_of(low);
}

// Candidates of one search: the ids of the bucket in which the wanted prefix ends, ascending, with key and weight.
struct Search {
    int64_t* weight_in;  // [BUCKETS]
    int64_t* weight;     // [vocab]
    uint32_t* key;       // [vocab]
    int32_t* id;         // [vocab]
};

// Index of the bucket in which the running weight reaches `need`, which is reduced by what lies before.
int crossing_bucket(const int64_t* weight_in, int64_t& need) {
    int b = 0;
    while (weight_in[b] < need) need -= weight_in[b++];
    return b;
}

// Narrows the rule to the smallest prefix of its ids, by (y descending, id ascending), with enough weight.
// BY_MASS: weights are masses and enough is ceil(p * their total); else every id weighs one and enough is k.
template <bool BY_MASS, bool DIVIDE>
void narrow(const float* z, int64_t vocab, const Row& row, int64_t k, float p, const Search& s, KeptRule& rule) {
    const F16 t = set1(row.t), max = set1(row.max), unit = set1(BUCKETS_PER_UNIT), farthest = set1(BUCKETS - 1);
    memset(s.weight_in, 0, BUCKETS * sizeof(int64_t));
    float bucket[CHUNK];
    int64_t weight[CHUNK];
    for (int i = 0; i < CHUNK; i++) weight[i] = 1;
    for (int64_t first = 0; first < vocab; first += CHUNK) {
        const int64_t n = min_of(CHUNK, vocab - first);
        const Chunk c = load_chunk<DIVIDE>(z + first, n, t);
        uint64_t word = kept_word<KEEP_RULE>(c, first, n, rule, nullptr);
        if (!word) continue;
        for (int q = 0; q < 4; q++) {
            const F16 d = max - c.y[q];
            store(bucket + 16 * q, min(d * unit, farthest));
            if (BY_MASS) store(weight + 16 * q, mass_of(exp(negate(d))));
        }
        for (; word; word &= word - 1) {
            const int i = __builtin_ctzll(word);
            s.weight_in[int(bucket[i])] += weight[i];
        }
    }
    int64_t total = 0;
    for (int b = 0; b < BUCKETS; b++) total += s.weight_in[b];
    int64_t need = BY_MASS ? ceil_share(p, total) : k;
    if (need > total) return;
    const float wanted = float(crossing_bucket(s.weight_in, need));
    const F16 from = set1(wanted), to = set1(wanted + 1.0f);
    int64_t count = 0;
    for (int64_t first = 0; first < vocab; first += CHUNK) {
        const int64_t n = min_of(CHUNK, vocab - first);
        const Chunk c = load_chunk<DIVIDE>(z + first, n, t);
        uint64_t inside = 0;
        for (int q = 0; q < 4; q++) {
            const F16 b = min((max - c.y[q]) * unit, farthest);
            inside |= uint64_t(mask_bits(greater_equal(b, from)) & mask_bits(less(b, to))) << (16 * q);
        }
        if (!inside) continue;
        inside &= kept_word<KEEP_RULE>(c, first, n, rule, nullptr);
        float y[CHUNK];
        for (int q = 0; q < 4; q++) {
            store(y + 16 * q, c.y[q]);
            if (BY_MASS) store(weight + 16 * q, mass_of(exp(negate(max - c.y[q]))));
        }
        for (; inside; inside &= inside - 1) {
            const int i = __builtin_ctzll(inside);
            s.key[count] = key_of(y[i]);
            s.id[count] = int32_t(first + i);
            s.weight[count++] = weight[i];
        }
    }
    // Each level divides the range of keys by 2048 and keeps the order of ids, until one key is left.
    for (;;) {
        uint32_t lowest = ~0u, highest = 0;
        for (int64_t i = 0; i < count; i++) {
            lowest = s.key[i] < lowest ? s.key[i] : lowest;
            highest = s.key[i] > highest ? s.key[i] : highest;
        }
        if (lowest == highest) break;
        const int shift = int(max_of(0, 32 - __builtin_clz(highest - lowest) - 11));
        memset(s.weight_in, 0, BUCKETS * sizeof(int64_t));
        for (int64_t i = 0; i < count; i++) s.weight_in[(highest - s.key[i]) >> shift] += s.weight[i];
        const uint32_t chosen = uint32_t(crossing_bucket(s.weight_in, need));
        int64_t kept = 0;
        for (int64_t i = 0; i < count; i++) {
            if ((highest - s.key[i]) >> shift != chosen) continue;
            s.key[kept] = s.key[i]; s.id[kept] = s.id[i]; s.weight[kept++] = s.weight[i];
        }
        count = kept;
    }
    int64_t i = 0;
    while (s.weight[i] < need) need -= s.weight[i++];
    rule.cut = value_of(s.key[i]);
    rule.last = s.id[i];
}

// First id, ascending, whose running mass exceeds r, among the ids of one leaf.
template <int KIND, bool DIVIDE>
int64_t crossing_id(const VocabularyRows& v, int64_t r, const Row& row, int64_t begin, int64_t end, int64_t target) {
    const float* z = v.logits + r * v.vocab;
    const F16 t = set1(row.t), max = set1(row.max), least = set1(v.rules[r].least);
    const uint64_t* bits = v.bits ? v.bits + r * num_words(v.vocab) : nullptr;
    for (int64_t first = begin; first < end; first += CHUNK) {
        const int64_t n = min_of(CHUNK, end - first);
        const Chunk c = load_chunk<DIVIDE>(z + first, n, t);
        const uint64_t word = kept_word<KIND>(c, first, n, v.rules[r], bits);
        if (!word) continue;
        L16 masses[4], sum = no_mass();
        for (int q = 0; q < 4; q++) {
            const F16 e = exp(c.y[q] - max);
            uint32_t kept = uint32_t(word >> (16 * q)) & 0xffffu;
            if (KIND == KEEP_RULE) kept &= mask_bits(greater_equal(e, least));
            masses[q] = mass_of(select(mask_of(kept), e, zero()));
            sum = sum + masses[q];
        }
        const int64_t chunk = total_of(sum);
        if (target >= chunk) { target -= chunk; continue; }
        int64_t mass[CHUNK];
        for (int q = 0; q < 4; q++) store(mass + 16 * q, masses[q]);
        int64_t i = 0;
        while (target >= mass[i]) target -= mass[i++];
        return first + i;
    }
    __builtin_unreachable();  // the leaf's mass exceeds the target
}

int64_t draw(const VocabularyRows& v, int64_t r, const Row& row, const int64_t* key) {
    const int64_t leaves = num_leaves(v);
    const LeafState* leaf = v.leaves + r * leaves;
    if (row.greedy) {
        const float* z = v.logits + r * v.vocab;
        int64_t i = 0;
        while (leaf[i].max + 0.0f != row.max) i++;
        i *= v.leaf_size;
        while (z[i] + 0.0f != row.max) i++;
        return i;
    }
    int64_t total = 0;
    for (int64_t i = 0; i < leaves; i++) total += leaf[i].mass;
    int64_t target = int64_t(uint128(sampling_draw(key)) * uint64_t(total) >> 64), i = 0;
    while (target >= leaf[i].mass) target -= leaf[i++].mass;
    const int64_t begin = i * v.leaf_size, end = min_of(v.vocab, begin + v.leaf_size);
    int64_t id = 0;
    with_constants(v.rules[r].kind, row.t != 1.0f, [&](auto kind, auto by) {
        id = crossing_id<kind(), by()>(v, r, row, begin, end, target);
    });
    return id;
}

}  // namespace

KeptRule find_rule(const VocabularyRows& v, int64_t r, const Row& row, Team& team) {
    KeptRule rule = {-HUGE_VALF, int32_t(v.vocab - 1), 0.0f, KEEP_RULE};
    const float* z = v.logits + r * v.vocab;
    char* scratch = static_cast<char*>(team.scratch_bytes(BUCKETS * 8 + v.vocab * 16));
    Search s;
    s.weight_in = reinterpret_cast<int64_t*>(scratch);
    s.weight = s.weight_in + BUCKETS;
    s.key = reinterpret_cast<uint32_t*>(s.weight + v.vocab);
    s.id = reinterpret_cast<int32_t*>(s.key + v.vocab);
    const int64_t k = v.top_k[r];
    const float p = v.top_p[r], min_p = v.min_p[r];
    with_constants(KEEP_RULE, row.t != 1.0f, [&](auto, auto by) {
        if (k > 0 && k < v.vocab) narrow<false, by()>(z, v.vocab, row, k, 1.0f, s, rule);
        if (p < 1.0f) narrow<true, by()>(z, v.vocab, row, 0, p, s, rule);
    });
    if (min_p > 0.0f) rule.least = least_with_mass(ceil_share(min_p, int64_t(MASS_UNIT)));
    return rule;
}

void run_sample(const void* args, Team& team) {
    const SampleArgs& a = *static_cast<const SampleArgs*>(args);
    vocabulary_sums<true>(a.rows, a.v, team);
    for (int64_t r; (r = team.next(3)) < a.rows;) {
        const Row row = row_head(a.v, r);
        a.ids[r] = row.finite ? draw(a.v, r, row, a.keys + 4 * r) : 0;
        finish_row(a.v, r, row, a.ids[r]);
    }
}

}  // namespace zg
