// Where keys and values stand in pages, and what FP8 adds to attention: quantised rows, tiles of codes, scales.
#pragma once
#include "attention.h"
#include "e4m3.h"
#include <type_traits>

namespace zg {
namespace {

struct Tiles {  // where the keys of one sequence and KV head stand
    const int32_t* pages;  // page of each page_size keys
    int64_t page_size, head, num_kv_heads, page_stride;
    struct Place { int64_t bytes, key; };  // from the first page to this head's part of the page, and key in it
    Place operator()(int64_t key) const {  // of the key at absolute position `key`
        const int64_t page = key / page_size;
        return {(pages[page] * num_kv_heads + head) * page_stride, key - page * page_size};
    }
};

// Element `element` of each key, at `place`, of pages that begin at `pages`; V may be const.
template <class V, class P> static inline V* at_place(P* pages, Tiles::Place place, int64_t elements_per_key) {
    typedef std::conditional_t<std::is_const_v<P>, const char, char> Byte;
    return reinterpret_cast<V*>(reinterpret_cast<Byte*>(pages) + place.bytes) + place.key * elements_per_key;
}

// A tile of codes consists of groups of 64: two steps of sixteen columns, which Decoder::pair turns into two steps of
// BF16 pairs. Keys: step = a pair of dims, column = key, [D / 4] groups. Values: step = a pair of keys, column = dim,
// [4 pairs of steps][D / 16] groups. Within a group, element i of the pair of step s at column c:
constexpr int GROUP = 64;
static inline int64_t in_group(int64_t step, int64_t column, int64_t i) {
    return column / 4 * 16 + step % 2 * 8 + column % 4 * 2 + i;
}
static inline int64_t key_code(int64_t key, int64_t d) { return d / 4 * GROUP + in_group(d / 2, key, d % 2); }
static inline int64_t value_code(int64_t key, int64_t d, int64_t head_dim) {
    return (key / 4 * (head_dim / LANES) + d / LANES) * GROUP + in_group(key / 2, d % LANES, key % 2);
}

// Turns groups of codes into BF16 steps; the same bits on every instruction set.
struct GroupDecoder {
#if defined(__AVX512VBMI__)
    Decoder decoder;
    void operator()(const uint8_t* codes, bf16* first, bf16* second) const {
        __m512i low, high;
        decoder.pair(_mm512_loadu_si512(codes), low, high);
        _mm512_storeu_si512(first, low);
        _mm512_storeu_si512(second, high);
    }
#else
    void operator()(const uint8_t* codes, bf16* first, bf16* second) const {
        for (int64_t lane = 0; lane < 4; lane++) {
            bf16 both[16];
            decode16(codes + lane * 16, both);
            memcpy(first + lane * 8, both, 16);
            memcpy(second + lane * 8, both + 8, 16);
        }
    }
#endif
    static const GroupDecoder& shared() {  // its tables are made once
        static const GroupDecoder made;
        return made;
    }
};

// One tile of codes as the dense BF16 tile that attention.h describes.
static inline void decode_keys(const GroupDecoder& decode, const uint8_t* codes, int64_t head_dim, bf16* tile) {
    for (int64_t at = 0; at < head_dim * TILE_KEYS; at += GROUP) decode(codes + at, tile + at, tile + at + GROUP / 2);
}
static inline void decode_values(const GroupDecoder& decode, const uint8_t* codes, int64_t head_dim, bf16* tile) {
    const int64_t step = 2 * head_dim;
    for (int64_t pair = 0; pair < TILE_KEYS / 4; pair++, codes += 2 * step, tile += 2 * step)
        for (int64_t d = 0; d < step; d += 2 * LANES) decode(codes + 2 * d, tile + d, tile + step + d);
}

// Scale of one row of head_dim numbers from their own largest magnitude.
static inline float row_scale(const bf16* x, int64_t head_dim, bool pow2) {
    F16 largest = zero();
    for (int64_t d = 0; d < head_dim; d += LANES) largest = larger_magnitude(largest, load(x + d));
    return block_scale(lane_largest(largest), pow2);
}

// A calibrated scale as it is used: NaN unless it is a positive number, so that nothing computed with it can pass.
static inline float given_scale(float scale) { return scale > 0 && scale < HUGE_VALF ? scale : NAN; }

// x / scale, to be rounded to codes or grid values; what is not finite becomes NaN instead of saturating.
static inline F16 unscaled(F16 x, F16 scale) { return select(less(abs(x), set1(HUGE_VALF)), x / scale, set1(NAN)); }

// A row to BF16 grid values; in and out may be the same.
static inline void quantise_row(const bf16* x, int64_t head_dim, float scale, bf16* grid) {
    for (int64_t d = 0; d < head_dim; d += LANES) store(grid + d, round_e4m3(unscaled(load(x + d), set1(scale))));
}

// How products read tiles. A unit is one step (InPlace) or a group of two (InRegisters); steps follow each other at
// key_stride or value_stride Cells, and column(c) is where column c of a step of values begins. `ahead`: bytes from a tile
// to the one that is read a block later, which is fetched meanwhile.
template <class T> struct InPlace {
    typedef T Cell;
    static int64_t key_stride() { return TILE_KEYS * Step<T>::WIDTH; }
    static int64_t value_stride(int64_t head_dim) { return head_dim * Step<T>::WIDTH; }
    static int64_t column(int64_t c) { return c * Step<T>::WIDTH; }
    template <int ROWS, int COLS>
    static inline __attribute__((always_inline)) void run(F16 (&acc)[ROWS][COLS], int64_t steps, const T* a,
                                                         int64_t a_stride, const T* const (&b)[COLS], int64_t stride,
                                                         const int64_t (&ahead)[COLS]) {
        constexpr int W = Step<T>::WIDTH;
        for (int64_t s = 0; s < steps; s++) {
            typename Step<T>::Lanes lanes[COLS];
#pragma GCC unroll 8
            for (int c = 0; c < COLS; c++) {
                const T* from = b[c] + s * stride;
                __builtin_prefetch(reinterpret_cast<const char*>(from) + ahead[c], 0, 2);
                lanes[c] = Step<T>::lanes(from);
            }
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                const typename Step<T>::Lanes word = Step<T>::spread(a + r * a_stride + s * W);
#pragma GCC unroll 8
                for (int c = 0; c < COLS; c++) acc[r][c] = Step<T>::add(acc[r][c], word, lanes[c]);
            }
        }
    }
};

#if defined(__AVX512VBMI__)
struct InRegisters {
    typedef uint8_t Cell;
    static int64_t key_stride() { return GROUP; }
    static int64_t value_stride(int64_t head_dim) { return 4 * head_dim; }
    static int64_t column(int64_t c) { return c / LANES * GROUP; }
    template <int ROWS, int COLS>
    static inline __attribute__((always_inline)) void run(F16 (&acc)[ROWS][COLS], int64_t steps, const bf16* a,
                                                         int64_t a_stride, const uint8_t* const (&b)[COLS],
                                                         int64_t stride, const int64_t (&ahead)[COLS]) {
        const Decoder decoder = GroupDecoder::shared().decoder;
        for (int64_t s = 0; s < steps; s += 2) {
            const bool both = s + 1 < steps;
#pragma GCC unroll 8
            for (int c = 0; c < COLS; c++) {
                const uint8_t* from = b[c] + s / 2 * stride;
                __builtin_prefetch(from + ahead[c], 0, 2);
                P16 low, high;
                decoder.pair(load_pairs(reinterpret_cast<const bf16*>(from)), low, high);
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; r++) {
                    const bf16* word = a + r * a_stride + s * 2;
                    acc[r][c] = dot_pairs(acc[r][c], set1_pair(word), low);
                    if (both) acc[r][c] = dot_pairs(acc[r][c], set1_pair(word + 2), high);
                }
            }
        }
    }
};
constexpr int64_t IN_REGISTERS_ROWS = 6;  // most query rows for which decoding as they read is faster
#else
typedef InPlace<bf16> InRegisters;
constexpr int64_t IN_REGISTERS_ROWS = 0;
#endif

// What a call computes with: type of rows, pages of the same (Dense) or of codes with scales; MATH: FP8 operands; PARTS:
// tiles of MAX_ROWS query rows that walk over the blocks together.
template <class T> struct Dense {
    typedef T Row;
    typedef InPlace<T> Reader;
    static constexpr bool SCALED = false, DECODED = false, MATH = false;
    static constexpr int PARTS = 1;
};
template <bool FP8_MATH> struct Coded {  // a block is decoded into memory, for many rows
    typedef bf16 Row;
    typedef InPlace<bf16> Reader;
    static constexpr bool SCALED = true, DECODED = true, MATH = FP8_MATH;
    static constexpr int PARTS = 8;
};
template <bool FP8_MATH> struct Streamed {  // codes are decoded as they are read, for few rows
    typedef bf16 Row;
    typedef InRegisters Reader;
    static constexpr bool SCALED = true, DECODED = false, MATH = FP8_MATH;
    static constexpr int PARTS = 1;
};

}  // namespace
}  // namespace zg
