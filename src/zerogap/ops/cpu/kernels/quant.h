// Block quantisation to E4M3: what every FP8 operand goes through (docs/numerics.md, "FP8").
#pragma once
#include "team.h"

namespace zg {

// FP32 numbers, flat, to their E4M3 codes and BF16 grid values, without a scale.
struct EncodeArgs {
    int64_t rows;
    const float* x;  // [rows]
    uint8_t* codes;  // [rows]
    bf16* grid;      // [rows]
};
void run_encode(const void* args, Team& team);

// Codes, flat, to BF16 grid values.
struct DecodeArgs {
    int64_t rows;
    const uint8_t* codes;  // [rows]
    bf16* grid;            // [rows]
};
void run_decode(const void* args, Team& team);

}  // namespace zg
