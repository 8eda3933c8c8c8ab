// E4M3 codes of numbers and back, and the block quantiser of activations and weights.
#include "quant.h"
#include "e4m3.h"
#include "lanes.h"
#include "turn.h"

namespace zg {
namespace {

constexpr int64_t B = QUANT_BLOCK;

// One block of a weight: published values and codes, zeros beyond its edges.
struct alignas(64) BlockValues { bf16 x[B][B]; };
struct alignas(64) BlockCodes { uint8_t code[B][B]; };

// Rows [row, row + 128) and columns [column, column + 128) of source [rows, k], rounded to BF16.
template <typename S>
void read_block(const S* source, int64_t rows, int64_t k, int64_t row, int64_t column, BlockValues& block) {
    const int64_t high = min_of(B, rows - row), wide = min_of(B, k - column);
    if (high < B || wide < B) memset(&block, 0, sizeof(block));
    for (int64_t r = 0; r < high; r++) {
        const S* line = source + (row + r) * k + column;
        over_lanes(wide, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
            store_part(block.x[r] + i, load_part(line + i, n), n);
        });
    }
}

float quantise_block(const BlockValues& block, bool pow2, BlockCodes& codes) {
    const float scale = block_scale(block_amax(block.x[0], B * B), pow2);
    const Quotient over(scale);
    for (int64_t r = 0; r < B; r++)
        for (int64_t i = 0; i < B; i += LANES) encode(codes.code[r] + i, over(load(block.x[r] + i)));
    return scale;
}

// 64 rows of codes become 64 steps of a forward panel: row j is column j, bytes 2s and 2s + 1 of it are step s.
void forward_steps(const uint8_t (*code)[B], int64_t steps, uint8_t* out) {
#if defined(__AVX512F__)
    alignas(64) uint16_t even[32], odd[32];  // where each word of half a step stands in two turned registers
    for (int v = 0; v < 2; v++)
        for (int c = 0; c < 16; c++) {
            even[fp8_place(v * 16 + c) / 2] = uint16_t(v * 32 + 2 * c);
            odd[fp8_place(v * 16 + c) / 2] = uint16_t(v * 32 + 2 * c + 1);
        }
    const __m512i first = _mm512_load_si512(even), second = _mm512_load_si512(odd);
    for (int64_t from = 0; from < steps; from += 32)  // a 32-bit word holds two steps
        for (int pair = 0; pair < 2; pair++) {        // of the four vectors of columns
            __m512i low[16], high[16];
            for (int c = 0; c < 16; c++) {
                low[c] = _mm512_load_si512(code[pair * 32 + c] + from * 2);
                high[c] = _mm512_load_si512(code[pair * 32 + 16 + c] + from * 2);
            }
            turn(low);
            turn(high);
            for (int64_t s = from; s < min_of(from + 32, steps); s++) {
                const int64_t word = (s - from) / 2;
                const __m512i half = _mm512_permutex2var_epi16(low[word], s % 2 ? second : first, high[word]);
                _mm512_storeu_si512(out + s * FP8_STEP + pair * 64, half);
            }
        }
#else
    for (int64_t j = 0; j < 64; j++)
        for (int64_t s = 0; s < steps; s++) memcpy(out + s * FP8_STEP + fp8_place(j), code[j] + 2 * s, 2);
#endif
}

// 64 columns of codes become `steps` steps of a panel of the transpose: rows 2s and 2s + 1 are step s.
void transposed_steps(const uint8_t (*code)[B], int64_t column, int64_t steps, uint8_t* out) {
#if defined(__AVX512VBMI__)
    alignas(64) uint8_t index[FP8_STEP];
    for (int j = 0; j < 64; j++)
        for (int i = 0; i < 2; i++) index[fp8_place(j) + i] = uint8_t(i * 64 + j);
    const __m512i first = _mm512_load_si512(index), second = _mm512_load_si512(index + 64);
    for (int64_t s = 0; s < steps; s++) {
        const __m512i even = _mm512_load_si512(code[2 * s] + column), odd = _mm512_load_si512(code[2 * s + 1] + column);
        _mm512_storeu_si512(out + s * FP8_STEP, _mm512_permutex2var_epi8(even, first, odd));
        _mm512_storeu_si512(out + s * FP8_STEP + 64, _mm512_permutex2var_epi8(even, second, odd));
    }
#else
    for (int64_t s = 0; s < steps; s++)
        for (int64_t j = 0; j < 64; j++)
            for (int64_t i = 0; i < 2; i++) out[s * FP8_STEP + fp8_place(j) + i] = code[2 * s + i][column + j];
#endif
}

// The block at (row, column) of a weight [rows, k] into its places in both kinds of panels.
void place_block(const BlockCodes& block, int64_t rows, int64_t k, int64_t row, int64_t column, uint8_t* panels,
                 uint8_t* transposed) {
    const int64_t high = min_of(B, rows - row), wide = min_of(B, k - column);
    if (panels)
        for (int64_t j = 0; j < high; j += 64)
            forward_steps(block.code + j, ceil_div(wide, 2),
                          panels + (row + j) / 64 * fp8_panel_size(k) + column / 2 * FP8_STEP);
    if (transposed)
        for (int64_t j = 0; j < wide; j += 64)
            transposed_steps(block.code, j, ceil_div(high, 2),
                             transposed + (column + j) / 64 * fp8_panel_size(rows) + row / 2 * FP8_STEP);
}

// body(row, column) for the blocks of a [rows, k] tensor, shared out between threads.
template <typename Body> void over_weight_blocks(int64_t rows, int64_t k, Team& team, Body&& body) {
    const int64_t across = ceil_div(k, B);
    for (int64_t i; (i = team.next(0)) < ceil_div(rows, B) * across;) body(i / across * B, i % across * B);
}

template <typename S> void quantise_weight(const QuantiseWeightArgs& a, Team& team) {
    struct Work { BlockValues values; BlockCodes codes; };
    Work& work = *static_cast<Work*>(team.scratch_bytes(sizeof(Work)));
    over_weight_blocks(a.rows, a.k, team, [&](int64_t row, int64_t column) {
        read_block(static_cast<const S*>(a.source), a.rows, a.k, row, column, work.values);
        a.scales[row / B * ceil_div(a.k, B) + column / B] = quantise_block(work.values, a.pow2, work.codes);
        place_block(work.codes, a.rows, a.k, row, column, a.panels, a.transposed);
    });
}

}  // namespace

void run_quantise_rows(const void* args, Team& team) {
    const QuantiseRowsArgs& a = *static_cast<const QuantiseRowsArgs*>(args);
    const int64_t across = ceil_div(a.k, B), step = rows_per_item(a.k), total = a.rows * a.lines;
    for (int64_t first; (first = team.next(0) * step) < total;)
        for (int64_t row = first; row < min_of(first + step, total); row++)
            for (int64_t block = 0; block < across; block++) {
                const int64_t start = row * a.k + block * B, wide = min_of(B, a.k - block * B);
                const float scale = block_scale(block_amax(a.x + start, wide), a.pow2);
                a.scales[row * across + block] = scale;
                const Quotient over(scale);
                over_lanes(wide, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
                    store_part(a.grid + start + i, round_e4m3(over(load_part(a.x + start + i, n))), n);
                });
            }
}

void run_quantise_weight(const void* args, Team& team) {
    const QuantiseWeightArgs& a = *static_cast<const QuantiseWeightArgs*>(args);
    a.source_fp32 ? quantise_weight<float>(a, team) : quantise_weight<bf16>(a, team);
}

void run_pack_codes(const void* args, Team& team) {
    const PackCodesArgs& a = *static_cast<const PackCodesArgs*>(args);
    BlockCodes& block = *static_cast<BlockCodes*>(team.scratch_bytes(sizeof(BlockCodes)));
    over_weight_blocks(a.rows, a.k, team, [&](int64_t row, int64_t column) {
        memset(&block, 0, sizeof(block));
        for (int64_t r = 0; r < min_of(B, a.rows - row); r++)
            memcpy(block.code[r], a.codes + (row + r) * a.k + column, min_of(B, a.k - column));
        place_block(block, a.rows, a.k, row, column, a.panels, a.transposed);
    });
}

void run_unpack_codes(const void* args, Team& team) {
    const UnpackCodesArgs& a = *static_cast<const UnpackCodesArgs*>(args);
    over_weight_blocks(a.rows, a.k, team, [&](int64_t row, int64_t column) {
        for (int64_t r = row; r < min_of(row + B, a.rows); r++) {
            const uint8_t* steps = a.panels + r / 64 * fp8_panel_size(a.k) + fp8_place(r % 64);
            for (int64_t i = column; i < min_of(column + B, a.k); i++)
                a.codes[r * a.k + i] = steps[i / 2 * FP8_STEP + i % 2];
        }
    });
}

void run_dequantise(const void* args, Team& team) {
    const DequantiseArgs& a = *static_cast<const DequantiseArgs*>(args);
    const int64_t across = ceil_div(a.k, B), step = rows_per_item(a.k);
    for (int64_t first; (first = team.next(0) * step) < a.rows;)
        for (int64_t row = first; row < min_of(first + step, a.rows); row++)
            for (int64_t block = 0; block < across; block++) {
                const int64_t start = row * a.k + block * B;
                const F16 scale = set1(a.scales[row / a.block_rows * across + block]);
                over_lanes(min_of(B, a.k - block * B), [&](int64_t i, int64_t n) __attribute__((always_inline)) {
                    store_part(a.out + start + i, decode_n(a.codes + start + i, n) * scale, n);
                });
            }
}

void run_encode(const void* args, Team& team) {
    const EncodeArgs& a = *static_cast<const EncodeArgs*>(args);
    for (int64_t first; (first = team.next(0) * ITEM_ELEMENTS) < a.rows;)
        over_lanes(min_of(ITEM_ELEMENTS, a.rows - first), [&](int64_t i, int64_t n) __attribute__((always_inline)) {
            const F16 x = load_part(a.x + first + i, n);
            encode_n(a.codes + first + i, x, n);
            store_part(a.grid + first + i, round_e4m3(x), n);
        });
}

void run_block_scales(const void* args, Team& team) {
    const BlockScalesArgs& a = *static_cast<const BlockScalesArgs*>(args);
    for (int64_t i; (i = team.next(0)) < a.rows;) a.scales[i] = block_scale(a.amax[i], a.pow2);
}

void run_decode(const void* args, Team& team) {
    const DecodeArgs& a = *static_cast<const DecodeArgs*>(args);
    for (int64_t first; (first = team.next(0) * ITEM_ELEMENTS) < a.rows;)
        decode_row(a.codes + first, a.grid + first, min_of(ITEM_ELEMENTS, a.rows - first));
}

}  // namespace zg
