// A router's scores from its logits: forward and backward compute them by this one function.
#pragma once
#include "moe.h"
#include "lanes.h"
#include "sigmoid.h"

namespace zg {

static inline int64_t padded(int64_t experts) { return ceil_div(experts, LANES) * LANES; }

// Scores of one token, missing lanes +0, to score[padded(E)]; with sigmoid also 1 - score to `rest` unless that is null.
// Returns 0, or NaN where a logit is not finite.
static inline float scores_of(const RouterRule& rule, const float* z, float* score, float* rest) {
    F16 poison = zero();
    if (rule.sigmoid) {
        over_lanes(rule.num_experts, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
            const F16 x = load_part(z + i, n);
            poison = fma(x, zero(), poison);
            const Sigmoid s = sigmoid(x);
            store(score + i, n < LANES ? select(first_n(n), s.sig, zero()) : s.sig);
            if (rest) store(rest + i, s.rest);
        });
        return lane_sum(poison);
    }
    const F16 lowest = set1(-HUGE_VALF);
    F16 largest = lowest, sum = zero();
    over_lanes(rule.num_experts, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
        const F16 x = load_part(z + i, n);
        poison = fma(x, zero(), poison);
        largest = max(n < LANES ? select(first_n(n), x, lowest) : x, largest);
    });
    const F16 top = set1(lane_max(largest));
    over_lanes(rule.num_experts, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
        F16 e = exp(load_part(z + i, n) - top);
        if (n < LANES) e = select(first_n(n), e, zero());
        store(score + i, e);
        sum = sum + e;
    });
    const F16 total = set1(lane_sum(sum));
    for (int64_t i = 0; i < rule.num_experts; i += LANES) store(score + i, load(score + i) / total);
    return lane_sum(poison);
}

// What the chosen scores are divided by: their sum, ascending by expert from +0, plus the epsilon of sigmoid scores.
static inline float chosen_sum(const RouterRule& rule, const float* score, const int32_t* experts) {
    float sum = 0.0f;
    for (int64_t j = 0; j < rule.top_k; j++) sum = sum + score[experts[j]];
    return rule.sigmoid ? sum + SIGMOID_EPSILON : sum;
}

}  // namespace zg
