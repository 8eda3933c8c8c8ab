// Strided copies of columns.
#include "columns.h"

namespace zg {

void run_copy_columns(const void* args, Team& team) {
    constexpr int64_t ITEM_BYTES = 1 << 15;
    const CopyColumnsArgs& a = *static_cast<const CopyColumnsArgs*>(args);
    const int64_t size = a.element_bytes, bytes = a.width * size;
    const int64_t each = max_of(1, ITEM_BYTES / max_of(1, a.heads * bytes));
    for (int64_t row; (row = team.next(0) * each) < a.rows;)
        for (int64_t t = row; t < min_of(row + each, a.rows); t++) {
            const char* src = static_cast<const char*>(a.src) + t * a.src_row_stride * size;
            char* dst = static_cast<char*>(a.dst) + t * a.dst_row_stride * size;
            for (int64_t h = 0; h < a.heads; h++)
                memcpy(dst + h * a.dst_head_stride * size, src + h * a.src_head_stride * size, bytes);
        }
}

}  // namespace zg
