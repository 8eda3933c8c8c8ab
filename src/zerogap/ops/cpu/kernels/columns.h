// Strided copies of columns: taking rows apart, and putting them together.
#pragma once
#include "team.h"

namespace zg {

// For every row t and head h: `width` elements from src[t * src_row_stride + h * src_head_stride] on to
// dst[t * dst_row_stride + h * dst_head_stride] on. Strides count elements; source and destination do not overlap.
struct CopyColumnsArgs {
    int64_t rows;
    const void* src;
    void* dst;
    int64_t heads, width;
    int64_t src_row_stride, src_head_stride, dst_row_stride, dst_head_stride;
    int64_t element_bytes;
};
void run_copy_columns(const void* args, Team& team);

}  // namespace zg
