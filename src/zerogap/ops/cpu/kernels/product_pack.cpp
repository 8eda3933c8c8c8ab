// Row-major weights to panels and back. FP32 masters are rounded here, once: panels hold the published value.
#include "product_tile.h"
#include "turn.h"

namespace zg {
namespace {

// A panel is handled as 32-bit words: one FP32 element, or one pair of BF16 elements; 64 words stand side by side.
constexpr int64_t WORDS = 16;  // of the reduced axis, per visit

// `count` elements in the storage dtype, zeros after them up to whole words. Only FP32 to BF16 rounds.
template <typename T> inline void convert(const T* source, int64_t count, T* out) {
    memcpy(out, source, count * sizeof(T));
}
inline void convert(const float* source, int64_t count, bf16* out) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store(out + i, load(source + i));
    if (i < count) store_n(out + i, load_n(source + i, count - i), count - i);
}

// out[s * PANEL + j] = words[j][s] for `steps` of the 16 columns s.
inline void turn_steps(const uint32_t (&words)[LANES][WORDS], int64_t steps, uint32_t* out) {
#if defined(__AVX512F__)
    __m512i r[16];
    for (int i = 0; i < 16; i++) r[i] = _mm512_load_si512(words[i]);
    turn(r);
    for (int64_t s = 0; s < steps; s++) _mm512_storeu_si512(out + s * PANEL, r[s]);
#else
    for (int64_t s = 0; s < steps; s++)
        for (int64_t j = 0; j < LANES; j++) out[s * PANEL + j] = words[j][s];
#endif
}

// Rows [row, row + 64) of source [rows, k] into one panel: 16 x 16 words are turned at a time.
template <typename S, typename T> void pack_forward(const S* source, int64_t rows, int64_t k, int64_t row, T* panel) {
    constexpr int64_t PER = Storage<T>::PER_STEP, SPAN = WORDS * PER;
    uint32_t* out = reinterpret_cast<uint32_t*>(panel);
    for (int64_t from = 0; from < k; from += SPAN)
        for (int64_t first = 0; first < PANEL; first += LANES) {
            alignas(64) uint32_t words[LANES][WORDS];
            const int64_t count = min_of(SPAN, k - from);
            for (int64_t j = 0; j < LANES; j++) {
                T* line = reinterpret_cast<T*>(words[j]);
                if (row + first + j >= rows || count < SPAN) memset(line, 0, sizeof(words[j]));
                if (row + first + j < rows) convert(source + (row + first + j) * k + from, count, line);
            }
            turn_steps(words, steps_of<T>(count), out + from / PER * PANEL + first);
        }
}

// Columns [column, column + 64) of source, rows [from, to), into a panel of the transposed weight.
template <typename S, typename T>
void pack_transposed(const S* source, int64_t k, int64_t column, int64_t from, int64_t to, T* panel) {
    constexpr int64_t PER = Storage<T>::PER_STEP;
    const int64_t count = min_of(PANEL, k - column);
    for (int64_t row = from; row < to; row += PER) {
        alignas(64) T lines[PER][PANEL] = {};
        for (int64_t e = 0; e < min_of(PER, to - row); e++) convert(source + (row + e) * k + column, count, lines[e]);
        for (int64_t j = 0; j < PANEL; j += LANES)
            interleave(lines[0] + j, PANEL, LANES, panel + row * PANEL + j * PER);
    }
}

template <typename S, typename T> void pack(const PackArgs& args, Team& team) {
    const S* source = static_cast<const S*>(args.source);
    const int64_t rows = args.rows, k = args.k, down = ceil_div(rows, PANEL), across = ceil_div(k, PANEL);
    for (int64_t i; (i = team.next(0)) < down;) {  // 64 rows of the source, read from memory once
        const int64_t from = i * PANEL, to = min_of(from + PANEL, rows);
        if (args.panels) pack_forward(source, rows, k, from, static_cast<T*>(args.panels) + i * panel_size<T>(k));
        if (!args.transposed) continue;
        for (int64_t p = 0; p < across; p++)
            pack_transposed(source, k, p * PANEL, from, to, static_cast<T*>(args.transposed) + p * panel_size<T>(rows));
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
