// Mixture of experts around the grouped products: router, order of rows, combination, and their gradients
// (docs/numerics.md, "Mixture of experts").
//
// T tokens, E experts, k of them chosen per token. Rows are *sorted* by expert, then token: sorted row i belongs to one
// (token, expert) pair, and the token's j-th expert, ascending by index, stands in sorted row slots[t * k + j].
#pragma once
#include "team.h"

namespace zg {

constexpr float SIGMOID_EPSILON = 1e-20f;  // added to sums of sigmoid scores before they divide

// How scores follow from logits, and weights from scores.
struct RouterRule {
    int64_t num_experts, top_k;
    int32_t sigmoid;    // 0: softmax over all experts
    int32_t normalise;  // weights are divided by their sum (+ SIGMOID_EPSILON with sigmoid scores)
    float scaling;      // the last factor of every weight
};

// choice = score + bias. Groups of E / groups consecutive experts are ordered by the sum of their two largest choices
// (larger one first), and only experts of the best `top_groups` are eligible; then the k largest choices are chosen. Ties
// go to the lower index. A token with a logit or choice that is not finite gets experts 0 .. k - 1 with weights NaN.
struct RouteArgs {
    int64_t rows;
    const float* logits;  // [T, E]
    const float* bias;    // [E], or null
    int32_t* experts;     // [T, k] ascending
    float* weights;       // [T, k]
    float* margins;       // [T] lowest chosen choice - highest eligible one that was not; infinity if there is none
    RouterRule rule;
    int64_t groups, top_groups;
};
void run_route(const void* args, Team& team);

struct DispatchArgs {
    int64_t rows;
    const int32_t* experts;  // [T, k]
    int32_t* starts;         // [E + 1] first sorted row of each expert, then T k
    int32_t* tokens;         // [T k] token of each sorted row
    int32_t* slots;          // [T, k]
    int64_t num_experts, top_k;
};
void run_dispatch(const void* args, Team& team);

// out[slots[t, j]] = source[t] for all j.
struct SpreadArgs {
    int64_t rows;
    const void* source;    // [T] rows of row_bytes
    const int32_t* slots;  // [T, k]
    void* out;             // [T k] rows
    int64_t row_bytes, top_k;
};
void run_spread(const void* args, Team& team);

// out[t] = rn(sum): fma(weights[t, j], sorted[slots[t, j]], sum), j ascending, from +0; then sum + shared[t].
struct CombineArgs {
    int64_t rows;
    const void* sorted;    // [T k, width] storage dtype
    const int32_t* slots;  // [T, k]
    const float* weights;  // [T, k]
    const void* shared;    // [T, width] storage dtype, or null
    void* out;             // [T, width]
    int64_t width, top_k;
    int32_t storage;
};
void run_combine(const void* args, Team& team);

// d_sorted[slots[t, j]] = rn(weights[t, j] * dy[t]); d_weights[t, j] = lanesum(sorted[slots[t, j]] * dy[t]).
struct CombineGradArgs {
    int64_t rows;
    const void *dy, *sorted;
    const int32_t* slots;
    const float* weights;
    void* d_sorted;    // [T k, width], or null
    float* d_weights;  // [T, k], or null
    int64_t width, top_k;
    int32_t storage;
};
void run_combine_grad(const void* args, Team& team);

// Gradient of the logits, rn to storage. With balance, that of balance * sum over sequences and experts of
// E / (k n) count * mean of score / sum of scores, n tokens in the sequence, is added to the gradient of the scores.
struct RouteGradArgs {
    int64_t rows;
    const float* logits;           // [T, E]
    const int32_t* experts;        // [T, k]
    const float* d_weights;        // [T, k]
    const int32_t* sample_starts;  // [sequences + 1], or null without balance
    int32_t* counts;               // workspace [sequences, E], or null
    void* out;                     // [T, E] storage dtype
    RouterRule rule;
    int64_t num_sequences;
    double balance;
    int32_t storage;
};
void run_route_grad(const void* args, Team& team);

// out[t] = rn(sum): sorted[slots[t, j]] added from +0, j ascending, then shared[t], then router[t]; all FP32.
struct GatherSumArgs {
    int64_t rows;
    const float* sorted;   // [T k, width]
    const int32_t* slots;  // [T, k]
    const float *shared, *router;  // [T, width], or null
    void* out;             // [T, width] storage dtype
    int64_t width, top_k;
    int32_t storage;
};
void run_gather_sum(const void* args, Team& team);

}  // namespace zg
