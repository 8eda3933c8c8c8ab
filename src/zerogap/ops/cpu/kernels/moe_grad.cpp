// Gradients of combination and router, and the sum of a token's input gradients.
#include "moe_scores.h"

namespace zg {
namespace {

template <typename S> void combine_grad_row(const CombineGradArgs& a, int64_t row) {
    const S* dy = static_cast<const S*>(a.dy) + row * a.width;
    for (int64_t j = row * a.top_k; j < (row + 1) * a.top_k; j++) {
        const int64_t start = a.slots[j] * a.width;
        if (a.d_sorted) {
            S* out = static_cast<S*>(a.d_sorted) + start;
            const F16 weight = set1(a.weights[j]);
            over_lanes(a.width, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
                store_part(out + i, weight * load_part(dy + i, n), n);
            });
        }
        if (a.d_weights) {
            const S* sorted = static_cast<const S*>(a.sorted) + start;
            F16 sum = zero();
            over_lanes(a.width, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
                sum = fma(load_part(sorted + i, n), load_part(dy + i, n), sum);
            });
            a.d_weights[j] = lane_sum(sum);
        }
    }
}

// Gradient of the chosen scores, added to +0 in d_score.
void weights_to_scores(const RouteGradArgs& a, int64_t row, const float* score, float* d_score) {
    const RouterRule& rule = a.rule;
    const int32_t* experts = a.experts + row * rule.top_k;
    const float* d_weights = a.d_weights + row * rule.top_k;
    float divisor = 1.0f, mean = 0.0f;
    if (rule.normalise) {
        divisor = chosen_sum(rule, score, experts);
        for (int64_t j = 0; j < rule.top_k; j++)
            mean = mean + d_weights[j] * rule.scaling * (score[experts[j]] / divisor);
    }
    for (int64_t j = 0; j < rule.top_k; j++)
        d_score[experts[j]] = (d_weights[j] * rule.scaling - mean) / divisor;
}

// Adds the balance loss's gradient: each normalised score has the slope factor * count.
void add_balance(const RouterRule& rule, float factor, const int32_t* counts, const float* score, float* d_score) {
    float slope[LANES];
    const auto slopes = [&](int64_t i, int64_t n) {
        for (int64_t l = 0; l < LANES; l++) slope[l] = l < n ? factor * float(counts[i + l]) : 0.0f;
        return load(slope);
    };
    if (!rule.sigmoid) {
        over_lanes(rule.num_experts, [&](int64_t i, int64_t n) { store(d_score + i, load(d_score + i) + slopes(i, n)); });
        return;
    }
    F16 sum = zero(), mean = zero();
    for (int64_t i = 0; i < rule.num_experts; i += LANES) sum = sum + load(score + i);
    const F16 total = set1(lane_sum(sum) + SIGMOID_EPSILON);
    over_lanes(rule.num_experts, [&](int64_t i, int64_t n) { mean = fma(slopes(i, n), load(score + i) / total, mean); });
    const F16 level = set1(lane_sum(mean));
    over_lanes(rule.num_experts, [&](int64_t i, int64_t n) {
        store(d_score + i, load(d_score + i) + (slopes(i, n) - level) / total);
    });
}

// Through softmax, s (ds - lanesum(s ds)), or sigmoid, ds (s (1 - s)).
template <typename S> void scores_to_logits(const RouterRule& rule, const float* score, const float* rest,
                                            const float* d_score, S* out) {
    F16 sum = zero();
    for (int64_t i = 0; i < rule.num_experts; i += LANES) sum = fma(load(score + i), load(d_score + i), sum);
    const F16 mean = set1(lane_sum(sum));
    over_lanes(rule.num_experts, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
        const F16 s = load(score + i), d = load(d_score + i);
        store_part(out + i, rule.sigmoid ? d * (s * load(rest + i)) : s * (d - mean), n);
    });
}

template <typename S> void route_grad(const RouteGradArgs& a, Team& team) {
    const RouterRule& rule = a.rule;
    const int64_t experts = rule.num_experts, width = padded(experts);
    if (a.counts) {
        for (int64_t s; (s = team.next(0)) < a.num_sequences;) {
            int32_t* counts = a.counts + s * experts;
            memset(counts, 0, experts * sizeof(int32_t));
            for (int64_t i = a.sample_starts[s] * rule.top_k; i < a.sample_starts[s + 1] * rule.top_k; i++)
                counts[a.experts[i]]++;
        }
        team.barrier();
    }
    float* score = static_cast<float*>(team.scratch_bytes(3 * width * int64_t(sizeof(float))));
    float *rest = score + width, *d_score = rest + width;
    const int64_t step = rows_per_item(experts * 4);
    for (int64_t first; (first = team.next(1) * step) < a.rows;) {
        int64_t s = 0;
        for (int64_t row = first; row < min_of(first + step, a.rows); row++) {
            scores_of(rule, a.logits + row * experts, score, rest);
            memset(d_score, 0, width * sizeof(float));
            weights_to_scores(a, row, score, d_score);
            if (a.counts) {
                while (a.sample_starts[s + 1] <= row) s++;
                const double tokens = a.sample_starts[s + 1] - a.sample_starts[s];
                const float factor = float(a.balance * double(experts) / (double(rule.top_k) * tokens * tokens));
                add_balance(rule, factor, a.counts + s * experts, score, d_score);
            }
            scores_to_logits(rule, score, rest, d_score, static_cast<S*>(a.out) + row * experts);
        }
    }
}

template <typename S> void gather_sum_row(const GatherSumArgs& a, int64_t row) {
    const int32_t* slots = a.slots + row * a.top_k;
    S* out = static_cast<S*>(a.out) + row * a.width;
    over_lanes(a.width, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
        F16 sum = zero();
        for (int64_t j = 0; j < a.top_k; j++) sum = sum + load_part(a.sorted + slots[j] * a.width + i, n);
        if (a.shared) sum = sum + load_part(a.shared + row * a.width + i, n);
        if (a.router) sum = sum + load_part(a.router + row * a.width + i, n);
        store_part(out + i, sum, n);
    });
}

}  // namespace

void run_combine_grad(const void* args, Team& team) {
    const CombineGradArgs& a = *static_cast<const CombineGradArgs*>(args);
    const int64_t step = rows_per_item(a.width * a.top_k);
    for (int64_t first; (first = team.next(0) * step) < a.rows;)
        for (int64_t row = first; row < min_of(first + step, a.rows); row++)
            a.storage ? combine_grad_row<bf16>(a, row) : combine_grad_row<float>(a, row);
}

void run_route_grad(const void* args, Team& team) {
    const RouteGradArgs& a = *static_cast<const RouteGradArgs*>(args);
    a.storage ? route_grad<bf16>(a, team) : route_grad<float>(a, team);
}

void run_gather_sum(const void* args, Team& team) {
    const GatherSumArgs& a = *static_cast<const GatherSumArgs*>(args);
    const int64_t step = rows_per_item(a.width * a.top_k);
    for (int64_t first; (first = team.next(0) * step) < a.rows;)
        for (int64_t row = first; row < min_of(first + step, a.rows); row++)
            a.storage ? gather_sum_row<bf16>(a, row) : gather_sum_row<float>(a, row);
}

}  // namespace zg
