// Weight and bias gradients: FP32 sums over blocks of 128 rows of a pack, added ascending to FP32 accumulators.
//
// Both operands are first laid out along the reduced axis (the rows) in a workspace: x as panels of 64 columns, dy as
// groups of 16. Each pack starts on a step of its own, so an odd tail pairs with a zero and never with the next pack.
// FP8: both are quantised on the way there, each column of a block of rows with a scale of its own.
#include "product_fp8.h"
#include <type_traits>

namespace zg {
namespace {

constexpr int64_t BLOCK = 128;       // rows of a pack that are summed from +0 (a contract value)
constexpr int64_t NEAR = 512 << 10;  // bytes of x panels that one item runs a group of dy against: they stay in cache

// `rows` rows of 16 columns (zeros from `width` on) as E4M3 values laid out in steps, and the 16 columns' scales.
void quantise_columns(const bf16* source, int64_t stride, int64_t rows, int64_t width, bool pow2, float* scales,
                      bf16* out, int64_t step_stride) {
    alignas(64) bf16 values[BLOCK * LANES];
    F16 largest = zero();
    for (int64_t r = 0; r < rows; r++) largest = larger_magnitude(largest, load_n(source + r * stride, width));
    store(scales, largest);
    for (int i = 0; i < LANES; i++) scales[i] = block_scale(scales[i], pow2);
    const F16 scale = load(scales);
    for (int64_t r = 0; r < rows; r++)
        store(values + r * LANES, round_e4m3(load_n(source + r * stride, width) / scale));
    for (int64_t r = 0; r < rows; r += 2, out += step_stride)
        interleave(values + r * LANES, r + 1 < rows ? LANES : 0, LANES, out);
}

// Where 16-column vectors of an operand go: steps and vectors that far apart; FP8: their scales, blocks and vectors.
template <typename T> struct Target {
    T* out;
    int64_t step_stride, vector_stride;
    float* scales;  // null: not quantised
    int64_t block_scales, vector_scales;
};

template <typename T> struct Rows {  // the row axis cut into packs, each rounded up to whole steps
    const WeightGradArgs& args;
    int64_t steps, blocks;

    explicit Rows(const WeightGradArgs& a) : args(a), steps(0), blocks(0) {
        for (int64_t p = 0; p < a.num_packs; p++) {
            const int64_t rows = a.pack_starts[p + 1] - a.pack_starts[p];
            steps += steps_of<T>(rows);
            blocks += ceil_div(rows, BLOCK);
        }
    }
    // Lays columns [column, column + 16 vectors) of source [rows, width] out.
    void pack(const T* source, int64_t width, int64_t column, int64_t vectors, const Target<T>& to) const {
        constexpr int64_t PER = Storage<T>::PER_STEP;
        if constexpr (std::is_same_v<T, bf16>)
            if (to.scales) return pack_quantised(source, width, column, vectors, to);
        T* out = to.out;
        for (int64_t p = 0; p < args.num_packs; p++)
            for (int64_t row = args.pack_starts[p]; row < args.pack_starts[p + 1]; row += PER, out += to.step_stride) {
                const bool pair = row + 1 < args.pack_starts[p + 1];
                for (int64_t v = 0; v < vectors; v++) {
                    const int64_t at = column + v * LANES;
                    interleave(source + row * width + at, pair ? width : 0, width - at, out + v * to.vector_stride);
                }
            }
    }
    void pack_quantised(const T* source, int64_t width, int64_t column, int64_t vectors, const Target<T>& to) const {
        T* out = to.out;
        float* scales = to.scales;
        for (int64_t p = 0; p < args.num_packs; p++) {
            const int64_t end = args.pack_starts[p + 1];
            for (int64_t row = args.pack_starts[p]; row < end; row += BLOCK, scales += to.block_scales) {
                const int64_t count = min_of(BLOCK, end - row);
                for (int64_t v = 0; v < vectors; v++) {
                    const int64_t at = column + v * LANES;
                    quantise_columns(source + row * width + at, width, count, width - at, args.pow2,
                                     scales + v * to.vector_scales, out + v * to.vector_stride, to.step_stride);
                }
                out += steps_of<T>(count) * to.step_stride;
            }
        }
    }
};

// acc[MR rows, `count` columns of a panel] += one block's sum over `steps`.
template <typename T, int MR>
void accumulate(const T* left_rows, const T* panel, int64_t steps, float* acc, int64_t k, int64_t count) {
    const int64_t reduce = steps * Storage<T>::PER_STEP;
    if (count >= PANEL) return tile<T, MR, true, 0, ADD>(left_rows, 0, panel, acc, reduce, true, nullptr, k);
    alignas(64) float sum[MR * PANEL];
    tile<T, MR, true, 0>(left_rows, 0, panel, sum, reduce, true, nullptr);
    for (int m = 0; m < MR; m++, acc += k)
        for (int64_t j = 0; j < count; j += LANES)
            store_n(acc + j, load_n(acc + j, count - j) + load(sum + m * PANEL + j), count - j);
}

template <typename T>
void accumulate_any(int height, const T* a, const T* b, int64_t steps, float* acc, int64_t k, int64_t count) {
    switch (height) {
        case 1: return accumulate<T, 1>(a, b, steps, acc, k, count);
        case 2: return accumulate<T, 2>(a, b, steps, acc, k, count);
    }
    if constexpr (Storage<T>::TILE_ROWS >= 4) switch (height) {
        case 3: return accumulate<T, 3>(a, b, steps, acc, k, count);
        case 4: return accumulate<T, 4>(a, b, steps, acc, k, count);
    }
    if constexpr (Storage<T>::TILE_ROWS >= 6) switch (height) {
        case 5: return accumulate<T, 5>(a, b, steps, acc, k, count);
        case 6: return accumulate<T, 6>(a, b, steps, acc, k, count);
    }
    __builtin_trap();
}

// acc[`height` <= 6 rows, `count` columns of a panel] = fma(one block's sum over `steps`, scales, acc).
void accumulate_scaled(int64_t height, const bf16* left_rows, const bf16* panel, int64_t steps, float* acc, int64_t k,
                       int64_t count, const ColumnScales& scales) {
    const Unpacked right{panel};
    const int64_t reduce = steps * 2;
    if (count >= PANEL)
        return any_scaled_tile<true, true, 0>(height, left_rows, 0, right, acc, k, reduce, false, scales, nullptr);
    alignas(64) float sum[Storage<bf16>::TILE_ROWS * PANEL] = {};
    for (int64_t m = 0; m < height; m++) memcpy(sum + m * PANEL, acc + m * k, count * sizeof(float));
    any_scaled_tile<true, true, 0>(height, left_rows, 0, right, sum, PANEL, reduce, false, scales, nullptr);
    for (int64_t m = 0; m < height; m++) memcpy(acc + m * k, sum + m * PANEL, count * sizeof(float));
}

// Up to 16 rows of acc, one panel of columns: block after block, so that a block's slices serve all tiles from cache.
template <typename T>
void accumulate_group(const Rows<T>& rows, int64_t height, const T* a, const T* b, float* acc, int64_t k,
                      int64_t count, ColumnScales scales) {
    constexpr int64_t PER = Storage<T>::PER_STEP, TILE = Storage<T>::TILE_ROWS;
    for (int64_t p = 0; p < rows.args.num_packs; p++) {
        const int64_t end = rows.args.pack_starts[p + 1];
        for (int64_t row = rows.args.pack_starts[p]; row < end; row += BLOCK) {
            const int64_t steps = steps_of<T>(min_of(BLOCK, end - row));
            for (int64_t m = 0, tiles = ceil_div(height, TILE), mr; tiles; tiles--, m += mr) {
                mr = ceil_div(height - m, tiles);
                if constexpr (std::is_same_v<T, bf16>)
                    if (scales.rows) {
                        accumulate_scaled(mr, a + m * PER, b, steps, acc + m * k, k, count,
                                          {scales.rows + m, scales.columns});
                        continue;
                    }
                accumulate_any<T>(int(mr), a + m * PER, b, steps, acc + m * k, k, count);
            }
            if (scales.rows) scales = {scales.rows + GROUP, scales.columns + PANEL};
            a += steps * GROUP * PER;
            b += steps * PANEL * PER;
        }
    }
}

template <typename T> void weight_grad(const WeightGradArgs& args, Team& team) {
    const Rows<T> rows(args);
    const int64_t groups = ceil_div(args.n, GROUP), panels = ceil_div(args.k, PANEL), PER = Storage<T>::PER_STEP;
    const int64_t group_size = rows.steps * GROUP * PER, panel_elements = rows.steps * PANEL * PER;
    T* packed_x = static_cast<T*>(args.workspace);
    T* packed_dy = packed_x + panels * panel_elements;
    constexpr int64_t TOGETHER = PANEL / GROUP;  // groups of dy per item: whole cache lines of its rows
    // Scales of x as [panel][block][PANEL], then those of dy as [group][block][GROUP]; null, and strides of 0, in BF16.
    const int64_t blocks = args.scales ? rows.blocks : 0;
    float *x_scales = args.scales, *dy_scales = x_scales + panels * blocks * PANEL;
    for (int64_t i; (i = team.next(0)) < panels + ceil_div(groups, TOGETHER);) {
        if (i < panels) {
            const int64_t vectors = min_of(PANEL / LANES, ceil_div(args.k - i * PANEL, LANES));
            const Target<T> to{packed_x + i * panel_elements, PANEL * PER, LANES * PER,
                               x_scales + i * blocks * PANEL, PANEL, LANES};
            rows.pack(static_cast<const T*>(args.x), args.k, i * PANEL, vectors, to);
        } else {
            const int64_t g = (i - panels) * TOGETHER;
            const Target<T> to{packed_dy + g * group_size, GROUP * PER, group_size,
                               dy_scales + g * blocks * GROUP, GROUP, blocks * GROUP};
            rows.pack(static_cast<const T*>(args.dy), args.n, g * GROUP, min_of(TOGETHER, groups - g), to);
        }
    }
    team.barrier();
    const int64_t at_once = max_of(1, NEAR / max_of(1, panel_elements * int64_t(sizeof(T))));
    const int64_t runs = ceil_div(panels, at_once);
    for (int64_t i; (i = team.next(1)) < groups * runs;) {
        const int64_t g = i % groups, first = i / groups * at_once, height = min_of(GROUP, args.n - g * GROUP);
        for (int64_t p = first; p < min_of(first + at_once, panels); p++)
            accumulate_group<T>(rows, height, packed_dy + g * group_size, packed_x + p * panel_elements,
                                args.acc + g * GROUP * args.k + p * PANEL, args.k, args.k - p * PANEL,
                                {dy_scales + g * blocks * GROUP, x_scales + p * blocks * PANEL});
    }
}

template <typename T> void column_grad(const ColumnGradArgs& args, Team& team) {
    const T* dy = static_cast<const T*>(args.dy);
    for (int64_t i; (i = team.next(0)) * LANES < args.n;) {
        const int64_t column = i * LANES, count = args.n - column;
        F16 acc = load_n(args.acc + column, count);
        for (int64_t p = 0; p < args.num_packs; p++)
            for (int64_t row = args.pack_starts[p]; row < args.pack_starts[p + 1]; row += BLOCK) {
                F16 sum = zero();
                for (int64_t r = row; r < min_of(row + BLOCK, args.pack_starts[p + 1]); r++)
                    sum = sum + load_n(dy + r * args.n + column, count);
                acc = acc + sum;
            }
        store_n(args.acc + column, acc, count);
    }
}

}  // namespace

void run_weight_grad(const void* args, Team& team) {
    const WeightGradArgs& a = *static_cast<const WeightGradArgs*>(args);
    if (a.storage) weight_grad<bf16>(a, team);
    else weight_grad<float>(a, team);
}

void run_column_grad(const void* args, Team& team) {
    const ColumnGradArgs& a = *static_cast<const ColumnGradArgs*>(args);
    if (a.storage) column_grad<bf16>(a, team);
    else column_grad<float>(a, team);
}

}  // namespace zg
