// Router, order of rows and combination. A token's numbers depend on that token alone; the order of rows is a counting
// sort, which has one result.
#include "moe_scores.h"

namespace zg {
namespace {

// Marks the experts outside the best groups: their choice becomes -infinity.
void drop_groups(const RouteArgs& a, float* choice, float* group_score) {
    const int64_t size = a.rule.num_experts / a.groups;
    for (int64_t g = 0; g < a.groups; g++) {
        float first = -HUGE_VALF, second = -HUGE_VALF;
        for (int64_t i = g * size; i < (g + 1) * size; i++) {
            if (choice[i] > first) { second = first; first = choice[i]; }
            else if (choice[i] > second) second = choice[i];
        }
        group_score[g] = first + second;
    }
    for (int64_t kept = 0; kept < a.top_groups; kept++) {
        int64_t best = 0;
        for (int64_t g = 1; g < a.groups; g++) if (group_score[g] > group_score[best]) best = g;
        group_score[best] = -HUGE_VALF;
    }
    for (int64_t g = 0; g < a.groups; g++)
        if (group_score[g] > -HUGE_VALF)
            for (int64_t i = g * size; i < (g + 1) * size; i++) choice[i] = -HUGE_VALF;
}

float largest_of(const float* choice, int64_t count) {
    F16 largest = set1(-HUGE_VALF);
    for (int64_t i = 0; i < count; i += LANES) largest = max(load(choice + i), largest);
    return lane_max(largest);
}

// Puts the k best of `choice`, ties to the lower index, ascending by index into `experts`; returns the margin.
float choose(const RouterRule& rule, float* choice, int32_t* experts) {
    float lowest = 0.0f;
    for (int64_t j = 0; j < rule.top_k; j++) {
        lowest = largest_of(choice, rule.num_experts);
        int32_t expert = 0;
        while (choice[expert] != lowest) expert++;
        choice[expert] = -HUGE_VALF;
        int64_t at = j;
        for (; at > 0 && experts[at - 1] > expert; at--) experts[at] = experts[at - 1];
        experts[at] = expert;
    }
    return lowest - largest_of(choice, rule.num_experts);
}

void refuse(const RouteArgs& a, int64_t row) {
    for (int64_t j = 0; j < a.rule.top_k; j++) {
        a.experts[row * a.rule.top_k + j] = int32_t(j);
        a.weights[row * a.rule.top_k + j] = NAN;
    }
    a.margins[row] = NAN;
}

void route_row(const RouteArgs& a, int64_t row, float* score, float* choice, float* group_score) {
    const RouterRule& rule = a.rule;
    float poison = scores_of(rule, a.logits + row * rule.num_experts, score, nullptr);
    const F16 lowest = set1(-HUGE_VALF);
    F16 spoiled = zero();
    over_lanes(rule.num_experts, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
        F16 c = load(score + i);
        if (a.bias) c = c + load_part(a.bias + i, n);
        spoiled = fma(c, zero(), spoiled);
        store(choice + i, n < LANES ? select(first_n(n), c, lowest) : c);
    });
    poison = poison + lane_sum(spoiled);
    if (!(poison == 0.0f)) return refuse(a, row);
    if (a.groups > 1) drop_groups(a, choice, group_score);
    int32_t* experts = a.experts + row * rule.top_k;
    float* weights = a.weights + row * rule.top_k;
    a.margins[row] = choose(rule, choice, experts);
    const float divisor = rule.normalise ? chosen_sum(rule, score, experts) : 1.0f;
    for (int64_t j = 0; j < rule.top_k; j++) weights[j] = score[experts[j]] / divisor * rule.scaling;
}

template <typename S> void combine_row(const CombineArgs& a, int64_t row) {
    const int32_t* slots = a.slots + row * a.top_k;
    const float* weights = a.weights + row * a.top_k;
    const S* sorted = static_cast<const S*>(a.sorted);
    const S* shared = a.shared ? static_cast<const S*>(a.shared) + row * a.width : nullptr;
    S* out = static_cast<S*>(a.out) + row * a.width;
    over_lanes(a.width, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
        F16 sum = zero();
        for (int64_t j = 0; j < a.top_k; j++)
            sum = fma(set1(weights[j]), load_part(sorted + slots[j] * a.width + i, n), sum);
        if (shared) sum = sum + load_part(shared + i, n);
        store_part(out + i, sum, n);
    });
}

}  // namespace

void run_route(const void* args, Team& team) {
    const RouteArgs& a = *static_cast<const RouteArgs*>(args);
    const int64_t width = padded(a.rule.num_experts), step = rows_per_item(a.rule.num_experts * a.rule.top_k);
    float* scratch = static_cast<float*>(team.scratch_bytes((2 * width + a.groups) * int64_t(sizeof(float))));
    for (int64_t first; (first = team.next(0) * step) < a.rows;)
        for (int64_t row = first; row < min_of(first + step, a.rows); row++)
            route_row(a, row, scratch, scratch + width, scratch + 2 * width);
}

void run_dispatch(const void* args, Team& team) {
    const DispatchArgs& a = *static_cast<const DispatchArgs*>(args);
    if (team.next(0)) return;  // one thread counts: a few instructions per row
    const int64_t total = a.rows * a.top_k;
    int32_t* next = static_cast<int32_t*>(team.scratch_bytes(a.num_experts * int64_t(sizeof(int32_t))));
    memset(next, 0, a.num_experts * sizeof(int32_t));
    for (int64_t i = 0; i < total; i++) next[a.experts[i]]++;
    int32_t start = 0;
    for (int64_t e = 0; e < a.num_experts; e++) {
        a.starts[e] = start;
        start += next[e];
        next[e] = a.starts[e];
    }
    a.starts[a.num_experts] = start;
    for (int64_t t = 0, i = 0; t < a.rows; t++)
        for (int64_t j = 0; j < a.top_k; j++, i++) {
            const int32_t slot = next[a.experts[i]]++;
            a.slots[i] = slot;
            a.tokens[slot] = int32_t(t);
        }
}

void run_spread(const void* args, Team& team) {
    const SpreadArgs& a = *static_cast<const SpreadArgs*>(args);
    const int64_t step = rows_per_item(a.row_bytes / 2 * a.top_k);
    for (int64_t first; (first = team.next(0) * step) < a.rows;)
        for (int64_t t = first; t < min_of(first + step, a.rows); t++)
            for (int64_t j = 0; j < a.top_k; j++)
                memcpy(static_cast<char*>(a.out) + a.slots[t * a.top_k + j] * a.row_bytes,
                       static_cast<const char*>(a.source) + t * a.row_bytes, a.row_bytes);
}

void run_combine(const void* args, Team& team) {
    const CombineArgs& a = *static_cast<const CombineArgs*>(args);
    const int64_t step = rows_per_item(a.width * a.top_k);
    for (int64_t first; (first = team.next(0) * step) < a.rows;)
        for (int64_t row = first; row < min_of(first + step, a.rows); row++)
            a.storage ? combine_row<bf16>(a, row) : combine_row<float>(a, row);
}

}  // namespace zg
