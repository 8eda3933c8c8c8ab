// Leaf sums over the vocabulary, log-probs, and the gradient of the logits. The order of every sum is fixed by the
// vocabulary and the leaf size: sixteen lanes inside a leaf, then the tree. Threads claim (row, leaf) items.
#include "vocabulary.h"

namespace zg {
namespace {

// Largest logit of a leaf (over the kept ids where bits are given) and whether all are finite: 0 * z is NaN if not.
void leaf_max(const float* z, int64_t begin, int64_t end, const uint64_t* bits, LeafState& out) {
    const F16 lowest = set1(-HUGE_VALF);
    F16 max0 = lowest, max1 = lowest, poison0 = zero(), poison1 = zero();
    int64_t i = begin;
    if (!bits) {
        for (; i + 32 <= end; i += 32) {
            const F16 a = load(z + i), b = load(z + i + 16);
            max0 = max(a, max0); max1 = max(b, max1);
            poison0 = fma(a, zero(), poison0); poison1 = fma(b, zero(), poison1);
        }
    }
    for (; i < end; i += 16) {
        const F16 a = load_n(z + i, end - i);
        uint32_t kept = end - i >= 16 ? 0xffffu : (1u << (end - i)) - 1;
        if (bits) kept &= uint32_t(bits[i / CHUNK] >> (i % CHUNK));
        max0 = max(select(mask_of(kept), a, lowest), max0);
        poison0 = fma(a, zero(), poison0);
    }
    out.max = lane_max(max(max0, max1));
    out.poison = lane_sum(poison0 + poison1);
}

struct LeafWork {
    const float* z;
    int64_t begin, end;
    float t, max;
    KeptRule rule;
    const uint64_t* bits;
    uint64_t* bits_out;
};

template <int KIND, bool DIVIDE, bool MASS>
void leaf_sums(const LeafWork& w, LeafState& out) {
    const F16 t = set1(w.t), max = set1(w.max), least = set1(w.rule.least);
    F16 sum = zero(), weighted = zero();
    L16 mass = no_mass();
    int64_t count = 0;
    uint64_t digest = 0;
    for (int64_t first = w.begin; first < w.end; first += CHUNK) {
        const int64_t n = min_of(CHUNK, w.end - first);
        const Chunk c = load_chunk<DIVIDE>(w.z + first, n, t);
        uint64_t word = kept_word<KIND>(c, first, n, w.rule, w.bits);
        if (KIND != KEEP_ALL && !word) {  // excluded ids are exact zeros, so a chunk of them may be skipped
            if (w.bits_out) w.bits_out[first / CHUNK] = 0;
            continue;
        }
        for (int q = 0; q < 4; q++) {
            const F16 d = c.y[q] - max;
            F16 e = exp(d);
            if (KIND == KEEP_RULE) word &= ~(uint64_t(0xffffu ^ mask_bits(greater_equal(e, least))) << (16 * q));
            if (KIND != KEEP_ALL || n < CHUNK) e = select(mask_of(uint32_t(word >> (16 * q)) & 0xffffu), e, zero());
            sum = sum + e;
            weighted = fma(e, d, weighted);
            if (MASS) mass = mass + mass_of(e);
        }
        if (KIND != KEEP_ALL) {
            count += __builtin_popcountll(word);
            if (word) digest += word_digest(word, first / CHUNK);
        }
        if (w.bits_out) w.bits_out[first / CHUNK] = word;
    }
    out.sum = lane_sum(sum);
    out.weighted = lane_sum(weighted);
    out.mass = MASS ? total_of(mass) : 0;
    out.count = count;
    out.digest = digest;
}

// Adjacent pairs are added, an odd last one passes up, until one is left.
float tree_sum(float* x, int64_t n) {
    while (n > 1) {
        for (int64_t i = 0; i < n / 2; i++) x[i] = x[2 * i] + x[2 * i + 1];
        if (n & 1) x[n / 2] = x[n - 1];
        n = (n + 1) / 2;
    }
    return x[0];
}

template <int KIND, bool DIVIDE, class T>
void grad_leaf(const LogprobGradArgs& a, int64_t r, int64_t begin, int64_t end) {
    const float* z = a.logits + r * a.vocab;
    T* out = static_cast<T*>(a.out) + r * a.vocab;
    const KeptRule rule = a.rules[r];
    const uint64_t* bits = a.bits ? a.bits + r * num_words(a.vocab) : nullptr;
    const float temperature = a.temperature[r] == 0.0f ? 1.0f : a.temperature[r];
    const F16 t = set1(temperature), max = set1(a.row_max[r]), least = set1(rule.least), one = set1(1.0f);
    const F16 inverse = set1(1.0f) / set1(a.row_sum[r]), log_sum = set1(log_one(a.row_sum[r]));
    const F16 entropy = set1(a.entropy[r]), d_logp = set1(a.d_logp[r]), d_entropy = set1(a.d_entropy[r]);
    const int64_t target = a.targets[r];
    for (int64_t first = begin; first < end; first += CHUNK) {
        const int64_t n = min_of(CHUNK, end - first);
        const Chunk c = load_chunk<DIVIDE>(z + first, n, t);
        const uint64_t word = kept_word<KIND>(c, first, n, rule, bits);
        const uint64_t hot_word = target >= first && target < first + n ? uint64_t(1) << (target - first) : 0;
        for (int q = 0; q < 4 && 16 * q < n; q++) {
            const F16 d = c.y[q] - max, e = exp(d);
            uint32_t kept = uint32_t(word >> (16 * q)) & 0xffffu;
            if (KIND == KEEP_RULE) kept &= mask_bits(greater_equal(e, least));
            const F16 p = e * inverse, hot = select(mask_of(uint32_t(hot_word >> (16 * q)) & 0xffffu), one, zero());
            const F16 by_logp = (hot - p) * d_logp, by_entropy = (p * ((d - log_sum) + entropy)) * d_entropy;
            F16 g = by_logp - by_entropy;
            if (DIVIDE) g = g / t;
            store_n(out + first + 16 * q, select(mask_of(kept), g, zero()), n - 16 * q);
        }
    }
}

template <class T>
void grad_row_leaf(const LogprobGradArgs& a, int64_t r, int64_t leaf) {
    const int64_t begin = leaf * a.leaf_size, end = min_of(a.vocab, begin + a.leaf_size);
    if (a.d_logp[r] == 0.0f && a.d_entropy[r] == 0.0f) {  // a masked row, whatever its logits are
        memset(static_cast<T*>(a.out) + r * a.vocab + begin, 0, (end - begin) * sizeof(T));
        return;
    }
    const bool divide = a.temperature[r] != 0.0f && a.temperature[r] != 1.0f;
    with_constants(a.rules[r].kind, divide, [&](auto kind, auto by) { grad_leaf<kind(), by(), T>(a, r, begin, end); });
}

}  // namespace

template <bool MASS>
void vocabulary_sums(int64_t rows, const VocabularyRows& v, Team& team) {
    const int64_t leaves = num_leaves(v), words = num_words(v.vocab);
    for (int64_t item; (item = team.next(0)) < rows * leaves;) {
        const int64_t r = item / leaves, begin = item % leaves * v.leaf_size;
        const uint64_t* bits = v.bits && is_filtered(v, r) ? v.bits + r * words : nullptr;
        leaf_max(v.logits + r * v.vocab, begin, min_of(v.vocab, begin + v.leaf_size), bits, v.leaves[item]);
    }
    team.barrier();
    for (int64_t r; (r = team.next(1)) < rows;) {
        const Row row = row_head(v, r);
        if (!row.filtered || !row.finite) v.rules[r] = {-HUGE_VALF, int32_t(v.vocab - 1), 0.0f, KEEP_ALL};
        else if (v.bits) v.rules[r] = {-HUGE_VALF, int32_t(v.vocab - 1), 0.0f, KEEP_BITS};
        else v.rules[r] = find_rule(v, r, row, team);
    }
    team.barrier();
    for (int64_t item; (item = team.next(2)) < rows * leaves;) {
        const int64_t r = item / leaves, begin = item % leaves * v.leaf_size;
        const Row row = row_head(v, r);
        if (!row.finite) continue;
        const LeafWork work = {v.logits + r * v.vocab, begin, min_of(v.vocab, begin + v.leaf_size), row.t, row.max, v.rules[r],
                               v.bits ? v.bits + r * words : nullptr, v.bits_out ? v.bits_out + r * words : nullptr};
        LeafState& out = v.leaves[item];
        with_constants(v.rules[r].kind, row.t != 1.0f, [&](auto kind, auto by) { leaf_sums<kind(), by(), MASS>(work, out); });
    }
    team.barrier();
}
template void vocabulary_sums<true>(int64_t, const VocabularyRows&, Team&);
template void vocabulary_sums<false>(int64_t, const VocabularyRows&, Team&);

float finish_row(const VocabularyRows& v, int64_t r, const Row& row, int64_t target) {
    if (!row.finite) {
        v.logp[r] = v.entropy[r] = NAN;
        v.count[r] = 0;
        v.digest[r] = 0;
        return NAN;
    }
    const int64_t leaves = num_leaves(v);
    const LeafState* leaf = v.leaves + r * leaves;
    float sums[64], weighted[64];
    int64_t count = 0;
    uint64_t digest = 0;
    for (int64_t i = 0; i < leaves; i++) {
        sums[i] = leaf[i].sum;
        weighted[i] = leaf[i].weighted;
        count += leaf[i].count;
        digest += leaf[i].digest;
    }
    const KeptRule rule = v.rules[r];
    const float sum = tree_sum(sums, leaves), log_sum = log_one(sum);
    const float y = v.logits[r * v.vocab + target] / row.t + 0.0f, d = y - row.max;
    bool kept = true;
    if (rule.kind == KEEP_BITS) kept = v.bits[r * num_words(v.vocab) + target / CHUNK] >> (target % CHUNK) & 1;
    if (rule.kind == KEEP_RULE) kept = (y > rule.cut || (y == rule.cut && target <= rule.last)) && exp_one(d) >= rule.least;
    v.logp[r] = kept ? d - log_sum : -HUGE_VALF;
    v.entropy[r] = log_sum - tree_sum(weighted, leaves) / sum;
    v.count[r] = int32_t(rule.kind == KEEP_ALL ? v.vocab : count);
    v.digest[r] = rule.kind == KEEP_ALL ? 0 : digest;
    return sum;
}

void run_logprob(const void* args, Team& team) {
    const LogprobArgs& a = *static_cast<const LogprobArgs*>(args);
    vocabulary_sums<false>(a.rows, a.v, team);
    for (int64_t r; (r = team.next(3)) < a.rows;) {
        const Row row = row_head(a.v, r);
        a.row_max[r] = row.max;
        a.row_sum[r] = finish_row(a.v, r, row, a.targets[r]);
    }
}

void run_logprob_grad(const void* args, Team& team) {
    const LogprobGradArgs& a = *static_cast<const LogprobGradArgs*>(args);
    const int64_t leaves = ceil_div(a.vocab, a.leaf_size);
    for (int64_t item; (item = team.next(0)) < a.rows * leaves;) {
        if (a.storage) grad_row_leaf<bf16>(a, item / leaves, item % leaves);
        else grad_row_leaf<float>(a, item / leaves, item % leaves);
    }
}

}  // namespace zg
