// The optimizer's kernels: AdamW, sums of squares for the global norm, FP32 addition of gradient arrays.
#pragma once
#include "team.h"

namespace zg {

// One AdamW step (Loshchilov and Hutter 2019, algorithm 2), elementwise, in place; constants were made in FP64.
//   g = gradient * gradient_scale; m = fma(beta1, m, rest1 * g); v = fma(beta2, v, (rest2 * g) * g)
//   master = fma(-step_size, m / fma(sqrt(v), root_correction, eps), master * decay)
struct AdamWArgs {
    int64_t rows;  // elements
    float *master, *first, *second;
    const float* gradient;
    float gradient_scale, beta1, rest1, beta2, rest2, decay, step_size, root_correction, eps;
};
void run_adamw(const void* args, Team& team);

// sums[c] = FP64 sum of squares of the 65,536 elements of chunk c (the last may be shorter): sixteen lanes, element i in
// lane i % 16, then the halving tree.
constexpr int64_t NORM_CHUNK = 65536;
struct SquareSumsArgs {
    int64_t rows;  // elements
    const float* x;
    double* sums;  // [ceil(rows / NORM_CHUNK)]
};
void run_square_sums(const void* args, Team& team);

// out = a + b; out may be a or b.
struct AddArgs {
    int64_t rows;  // elements
    const float *a, *b;
    float* out;
};
void run_add(const void* args, Team& team);

}  // namespace zg
