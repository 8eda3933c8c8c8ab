// Rotary position embedding: the table of cosines and sines, the rotation and its inverse (docs/numerics.md, "RoPE").
#pragma once
#include "team.h"

namespace zg {

// out[p] = [cos(p * f_0) * factor .. cos(p * f_{half-1}) * factor, sin(p * f_0) * factor ..]: all FP64, then FP32.
// |angle| must stay below 2^20.
struct RopeTableArgs {
    int64_t rows;  // positions
    const double* frequencies;  // [half]
    float* out;                 // [rows, 2 * half]
    int64_t half;
    double factor;
};
void run_rope_table(const void* args, Team& team);

// Heads of head_dim elements: head h of row t starts at x + t * row_stride + h * head_stride (elements). x null: absent.
struct Turned {
    const void* x;
    void* out;
    int64_t heads, row_stride, head_stride, out_row_stride, out_head_stride;
};

// Per head, with x, y = the i-th pair, elements i and i + head_dim / 2, or `interleaved` 2i and 2i + 1; c, s = the table's
// at the row's position:  rn(fma(x, c, -(y * s))), rn(fma(y, c, x * s));  `inverse`: s with the other sign (the gradient).
struct RopeArgs {
    int64_t rows;
    Turned parts[2];
    const int32_t* positions;  // [rows]
    const float* table;        // [positions, head_dim]
    int64_t head_dim;
    int32_t storage, inverse, interleaved;
};
void run_rope(const void* args, Team& team);

}  // namespace zg
