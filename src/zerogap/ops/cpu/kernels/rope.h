// Rotary position embedding: the table of cosines and sines, the rotation and its inverse (docs/numerics.md, "RoPE").
#pragma once
#include "team.h"

namespace zg {

// out[p] = [cos(p * f_0) .. cos(p * f_{half-1}), sin(p * f_0) ..]: angle, cosine and sine FP64, then FP32.
// |angle| must stay below 2^20.
struct RopeTableArgs {
    int64_t rows;  // positions
    const double* frequencies;  // [half]
    float* out;                 // [rows, 2 * half]
    int64_t half;
};
void run_rope_table(const void* args, Team& team);

// Per head, with x, y = elements i and i + head_dim / 2, c, s = the table's at the row's position:
//   rn(fma(x, c, -(y * s))), rn(fma(y, c, x * s));  `inverse`: s with the other sign (the gradient).
struct RopeArgs {
    int64_t rows;
    const void *q, *k;  // [rows, q_heads * head_dim], [rows, k_heads * head_dim]; either may be null
    void *q_out, *k_out;
    const int32_t* positions;  // [rows]
    const float* table;        // [positions, head_dim]
    int64_t q_heads, k_heads, head_dim;
    int32_t storage, inverse;
};
void run_rope(const void* args, Team& team);

}  // namespace zg
