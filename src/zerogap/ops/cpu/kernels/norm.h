// RMSNorm over rows or heads, with the residual addition before it, and its gradients (docs/numerics.md, "RMSNorm").
#pragma once
#include "team.h"

namespace zg {

// residual = rn(x + delta) where delta is given, else x; over each of the `heads` parts of a row, `width` elements:
// normed = rn((r * inv) * weight), inv = 1 / sqrt(lane_sum(r * r) / width + eps), r the rounded residual.
struct NormArgs {
    int64_t rows;
    const void *x, *delta;  // [rows, heads * width]; delta may be null
    const void* weight;     // [width]
    void *residual, *normed;  // residual is not written where delta is null
    int64_t heads, width;
    float eps;
    int32_t storage;
};
void run_norm(const void* args, Team& team);

// With n = r * inv, g = d_normed * weight, c = lane_sum(g * n) / width:
//   dx = rn(d_residual + (g - n * c) * inv)        (without d_residual: no addition)
//   acc[leaf] += per block of 128 rows of a pack: sum of d_normed * n from +0, rows ascending, and inside a row the
//   heads of the leaf ascending.
struct NormGradArgs {
    int64_t rows;
    const void *x;           // the rounded residual [rows, heads * width]
    const void *weight, *d_residual, *d_normed;
    void* dx;                // null where no input gradient is wanted
    float* inverse;          // scratch [rows * heads]
    const int32_t* pack_starts;
    float* acc;              // [leaves, width], or null where the weight is not trained
    int64_t num_packs, heads, width, leaves;
    float eps;
    int32_t storage;
};
void run_norm_grad(const void* args, Team& team);

}  // namespace zg
