// Matrix products: y = x W^T + b, its input gradient and its weight gradient (docs/numerics.md, "matrix product").
#pragma once
#include "team.h"

namespace zg {

// Columns of a packed panel. A panel holds 64 output columns for the whole reduced axis:
//   BF16: [ceil(reduce / 2)][64][2]  (pairs along the reduced axis; an odd tail is a zero)
//   FP32: [reduce][64]
//   FP8:  uint8 [ceil(reduce / 2)][128]  E4M3 codes, a pair along the reduced axis per step. Column v * 16 + c of the
//         panel, element i of the pair: byte (v / 2) * 64 + (c / 4) * 16 + (v % 2) * 8 + (c % 4) * 2 + i
// The last panel's missing columns are zero. A packed weight is [ceil(width / 64)] panels.
constexpr int PANEL = 64;

struct ProductSegment {
    const void* x;       // [rows, reduce] storage dtype, contiguous
    const void* panels;  // packed [width, reduce]
    const void* bias;    // storage dtype [width], or null; added in FP32 before the rounding
    void* out;           // [rows, width]; ignored but in segment 0 where segments are summed
    int64_t width, reduce;
    int64_t leaf_size;   // elements of the reduced axis per leaf (the last may be ragged); 0 means one leaf
    // FP8 where panel_scales is given: x holds E4M3 values as BF16, panels their codes; FP32 scales per 128 elements of
    // the reduced axis and row of x (x_scales [rows, ceil(reduce / 128)]), or 128 columns of the weight: that of columns
    // 128 i .. and elements 128 j .. is panel_scales[i * scale_row_stride + j * scale_col_stride]. Several leaves are
    // then cut between scale blocks. BF16 storage only; segments with and without scales mix.
    const float *x_scales, *panel_scales;
    int64_t scale_row_stride, scale_col_stride;
};

enum ProductMode : int32_t {
    CONCATENATE = 0,  // segment s writes its own out_s (forward of fused projections)
    CHAIN = 1,        // one output; in each leaf one accumulator runs segment 0's slice, then segment 1's, ...; tree
    TREES = 2,        // one output; each segment's tree is finished, then they are added FP32 in order
};

struct ProductArgs {
    int64_t rows;
    int32_t num_segments, mode;
    int32_t storage;   // 0 FP32, 1 BF16: x, panels, bias
    int32_t out_fp32;  // 1: out is FP32 and unrounded (logits, subtree sums of a split layout)
    ProductSegment segment[4];
};
void run_product(const void* args, Team& team);

// Products of G weights of one shape, each with rows of its own, in one leaf each (experts; attention heads).
struct GroupedSegment {
    const void* x;       // storage dtype
    const void* panels;  // [groups] packed weights [width, reduce]
    void* out;           // ignored but in segment 0 where segments are summed
    int64_t width, reduce;
    // Elements from one row of a group to the next, and from a group to the next (0 where `starts` says where it is).
    int64_t x_row_stride, x_group_stride, out_row_stride, out_group_stride;
    // FP8 where panel_scales is given, as in ProductSegment; with `starts` only. x_scales: [all rows, ceil(reduce / 128)]
    const float *x_scales, *panel_scales;
    int64_t scale_row_stride, scale_col_stride;
};

struct GroupedArgs {
    int64_t rows;           // of every group where `starts` is null
    const int32_t* starts;  // [groups + 1] first row of each group, then the end of the last; or null
    int64_t groups;
    int32_t num_segments, mode;  // CONCATENATE or CHAIN
    int32_t storage, out_fp32;
    GroupedSegment segment[4];
};
void run_grouped_product(const void* args, Team& team);

// out = rn(((sums[0] + sums[1]) + ...) + bias): the end of products whose FP32 sums were combined over ranks.
struct FinishArgs {
    int64_t rows, n, num_sums;
    const float* sums[4];  // [rows, n]
    const void* bias;      // storage dtype [n], or null
    void* out;             // [rows, n] storage dtype
    int32_t storage;
};
void run_finish(const void* args, Team& team);

// acc[n, k] (FP32) += for each block of 128 rows of each pack, ascending: sum over its rows, ascending from +0, of
// dy[t, n] * x[t, k] with the multiply-add primitive over row pairs (2i, 2i + 1) of the block.
struct WeightGradArgs {
    int64_t rows;
    const void *dy, *x;         // [rows, n], [rows, k] storage dtype
    const int32_t* pack_starts;  // [num_packs + 1]
    int64_t num_packs, n, k;
    float* acc;
    void* workspace;  // storage dtype: (64 ceil(k / 64) + 16 ceil(n / 16)) * (rows + num_packs) elements
    // FP8 where given (BF16 storage): dy and x are quantised per column and block of rows, and a finished block's sum
    // enters by acc = fma(sum, fl32(scale_dy[n] * scale_x[k]), acc).
    float* scales;  // workspace: (64 ceil(k / 64) + 16 ceil(n / 16)) * (rows / 128 + num_packs) elements
    int32_t storage;
    int32_t pow2;  // scales are powers of two
};
void run_weight_grad(const void* args, Team& team);

// acc[n] += for each block of 128 rows of each pack: sum over its rows, ascending from +0, of dy[t, n] (bias gradient).
struct ColumnGradArgs {
    int64_t rows;
    const void* dy;
    const int32_t* pack_starts;
    int64_t num_packs, n;
    float* acc;
    int32_t storage;
};
void run_column_grad(const void* args, Team& team);

// Packs row-major source [rows, k] (FP32 masters are rounded) into forward panels (width = rows, reduce = k) and, where
// `transposed` is given, into the panels of the input gradient (width = k, reduce = rows).
struct PackArgs {
    int64_t rows, k;
    const void* source;
    int32_t source_fp32, storage;
    void *panels, *transposed;  // either may be null
};
void run_pack(const void* args, Team& team);

// Forward panels back to row-major [rows, k] in the storage dtype.
struct UnpackArgs {
    int64_t rows, k;
    const void* panels;
    void* out;
    int32_t storage;
};
void run_unpack(const void* args, Team& team);

}  // namespace zg
