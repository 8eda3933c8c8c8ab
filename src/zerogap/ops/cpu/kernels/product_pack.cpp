// Row-major weights to panels and back. FP32 masters are rounded here, once: what stands in panels is the published value.
#include "product_tile.h"

namespace zg {
namespace {

constexpr int64_t CHUNK = 64;  // elements of the reduced axis per visit: a few cache lines of each source row

static inline void convert(const float* source, float* out) { *out = *source; }
static inline void convert(const bf16* source, bf16* out) { *out = *source; }
static inline void convert(const float* source, bf16* out) { *out = float_to_bf16(*source); }

// Rows [row, row + 64) of source [rows, k], columns [from, to), into one panel.
template <typename S, typename T>
void pack_forward(const S* source, int64_t rows, int64_t k, int64_t row, int64_t from, int64_t to, T* panel) {
    constexpr int64_t PER = Storage<T>::PER_STEP;
    for (int64_t column = from; column < to; column += PER)
        for (int64_t j = 0; j < PANEL; j++)
            for (int64_t e = 0; e < PER; e++) {
                T* out = panel + column * PANEL + j * PER + e;
                if (row + j < rows && column + e < k) convert(source + (row + j) * k + column + e, out);
                else *out = 0;
            }
}

// Columns [column, column + 64) of source, rows [from, to), into a panel of the transposed weight.
template <typename S, typename T>
void pack_transposed(const S* source, int64_t rows, int64_t k, int64_t column, int64_t from, int64_t to, T* panel) {
    constexpr int64_t PER = Storage<T>::PER_STEP;
    for (int64_t row = from; row < to; row += PER)
        for (int64_t j = 0; j < PANEL; j++)
            for (int64_t e = 0; e < PER; e++) {
                T* out = panel + row * PANEL + j * PER + e;
                if (row + e < rows && column + j < k) convert(source + (row + e) * k + column + j, out);
                else *out = 0;
            }
}

template <typename S, typename T> void pack(const PackArgs& args, Team& team) {
    const S* source = static_cast<const S*>(args.source);
    const int64_t rows = args.rows, k = args.k, down = ceil_div(rows, PANEL), across = ceil_div(k, PANEL);
    if (args.panels)
        for (int64_t i; (i = team.next(0)) < down;)
            for (int64_t from = 0; from < k; from += CHUNK)
                pack_forward(source, rows, k, i * PANEL, from, min_of(from + CHUNK, k),
                             static_cast<T*>(args.panels) + i * panel_size<T>(k));
    if (args.transposed)
        for (int64_t i; (i = team.next(1)) < down * across;) {
            const int64_t from = i / across * PANEL, p = i % across;
            pack_transposed(source, rows, k, p * PANEL, from, min_of(from + PANEL, rows),
                            static_cast<T*>(args.transposed) + p * panel_size<T>(rows));
        }
}

template <typename T> void unpack(const UnpackArgs& args, Team& team) {
    constexpr int64_t PER = Storage<T>::PER_STEP;
    for (int64_t row; (row = team.next(0)) < args.rows;) {
        const T* panel = static_cast<const T*>(args.panels) + row / PANEL * panel_size<T>(args.k);
        T* out = static_cast<T*>(args.out) + row * args.k;
        for (int64_t c = 0; c < args.k; c++) out[c] = panel[(c / PER * PANEL + row % PANEL) * PER + c % PER];
    }
}

}  // namespace

void run_pack(const void* args, Team& team) {
    const PackArgs& a = *static_cast<const PackArgs*>(args);
    if (!a.storage) pack<float, float>(a, team);
    else if (a.source_fp32) pack<float, bf16>(a, team);
    else pack<bf16, bf16>(a, team);
}

void run_unpack(const void* args, Team& team) {
    const UnpackArgs& a = *static_cast<const UnpackArgs*>(args);
    if (a.storage) unpack<bf16>(a, team);
    else unpack<float>(a, team);
}

}  // namespace zg
