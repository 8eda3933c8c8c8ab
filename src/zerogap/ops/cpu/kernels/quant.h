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

// Scales of blocks whose largest magnitudes are known.
struct BlockScalesArgs {
    int64_t rows;
    const float* amax;  // [rows]
    float* scales;      // [rows]
    int32_t pow2;
};
void run_block_scales(const void* args, Team& team);

// Edge of a block: weights are quantised in blocks of 128 x 128 from row 0, column 0 of the logical tensor, activations
// and output gradients in blocks of 1 x 128 along the reduced axis; tails are ragged.
constexpr int64_t QUANT_BLOCK = 128;

// FP8 panels of a weight [width, reduce]: bytes [ceil(width / 64)][ceil(reduce / 2)][128]. The step of elements 2s and
// 2s + 1 of the reduced axis holds code i (0 or 1) of column v * 16 + c (v 0 .. 3, c 0 .. 15) at this place, where one
// byte permute and unpack make the pairs of two vectors (e4m3.h, Decoder). Missing columns and odd tails are code 0.
constexpr int64_t FP8_STEP = 128;
constexpr int64_t fp8_place(int64_t column) {
    const int64_t v = column / 16, c = column % 16;
    return v / 2 * 64 + c / 4 * 16 + v % 2 * 8 + c % 4 * 2;
}
static inline int64_t fp8_panel_size(int64_t reduce) { return ceil_div(reduce, 2) * FP8_STEP; }

// Rows to grid values and scales, each 1 x 128 block by its own largest magnitude. A row may be several lines of k.
struct QuantiseRowsArgs {
    int64_t rows;
    const bf16* x;  // [rows * lines, k]
    bf16* grid;     // [rows * lines, k]
    float* scales;  // [rows * lines, ceil(k / 128)]
    int64_t k, lines;
    int32_t pow2;   // 1: scales are powers of two
};
void run_quantise_rows(const void* args, Team& team);

// A weight [rows, k] to panels (width = rows, reduce = k), to the panels of its transpose (width = k, reduce = rows) and
// to one scale per block of 128 x 128. FP32 masters are rounded to BF16 first: codes are those of the published value.
struct QuantiseWeightArgs {
    int64_t rows, k;
    const void* source;
    int32_t source_fp32, pow2;
    uint8_t *panels, *transposed;  // either may be null
    float* scales;                 // [ceil(rows / 128), ceil(k / 128)]
};
void run_quantise_weight(const void* args, Team& team);

// Row-major codes [rows, k] to panels and to those of the transpose.
struct PackCodesArgs {
    int64_t rows, k;
    const uint8_t* codes;
    uint8_t *panels, *transposed;  // either may be null
};
void run_pack_codes(const void* args, Team& team);

// Forward panels back to row-major codes [rows, k].
struct UnpackCodesArgs {
    int64_t rows, k;
    const uint8_t* panels;
    uint8_t* codes;
};
void run_unpack_codes(const void* args, Team& team);

// out = rn(fl32(grid value * scale)), [rows, k]; one scale per block of block_rows x 128.
struct DequantiseArgs {
    int64_t rows, k;
    const uint8_t* codes;
    const float* scales;  // [ceil(rows / block_rows), ceil(k / 128)]
    bf16* out;
    int64_t block_rows;
};
void run_dequantise(const void* args, Team& team);

}  // namespace zg
