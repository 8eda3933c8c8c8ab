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

// *into = the larger of two magnitudes, by any number of threads. Bits of magnitudes ascend with them, NaN above infinity.
static inline void raise_magnitude(float* into, float magnitude) {
    const uint32_t largest = bits_of(magnitude);
    uint32_t* bits = reinterpret_cast<uint32_t*>(into);
    uint32_t seen = __atomic_load_n(bits, __ATOMIC_RELAXED);
    while (seen < largest &&
           !__atomic_compare_exchange_n(bits, &seen, largest, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
}

// A calibrated scale as it is used: NaN unless it is a positive number, so that nothing computed with it can pass.
static inline float given_scale(float scale) { return scale > 0 && scale < HUGE_VALF ? scale : NAN; }

// x / scale, to be rounded to codes or grid values; what is not finite becomes NaN instead of saturating.
static inline F16 unscaled(F16 x, F16 scale) { return select(less(abs(x), set1(HUGE_VALF)), x / scale, set1(NAN)); }

// A row to BF16 grid values; in and out may be the same.
static inline void quantise_row(const bf16* x, int64_t head_dim, float scale, bf16* grid) {
    for (int64_t d = 0; d < head_dim; d += LANES) store(grid + d, round_e4m3(unscaled(load(x + d), set1(scale))));
}

// The tiles of one block of keys or values, and how many bytes further those of the next block are, which is fetched
// meanwhile.
template <class Cell> struct BlockTiles {
    const Cell* tile[4];
    int64_t ahead[4];
};

// Written out, so that accumulators are born in registers.
template <int ROWS, int COLS> static inline __attribute__((always_inline)) void clear(F16 (&acc)[ROWS][COLS]) {
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
        for (int c = 0; c < COLS; c++) acc[r][c] = zero();
}

// How products read tiles: `keys` adds q times the keys of tiles `begin` on, `values` p times the first `steps` steps of
// the block's values, columns from `column` on. A chain takes steps in ascending order.
template <class T> struct InPlace {
    typedef T Cell;
    static constexpr int64_t W = Step<T>::WIDTH;
    template <int ROWS, int COLS>
    static inline __attribute__((always_inline)) void run(F16 (&acc)[ROWS][COLS], int64_t steps, const T* a,
                                                         int64_t a_stride, const T* const (&b)[COLS], int64_t stride,
                                                         const int64_t (&ahead)[COLS]) {
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
    template <int ROWS, int COLS>
    static inline __attribute__((always_inline)) void keys(F16 (&acc)[ROWS][COLS], const T* q, int64_t head_dim,
                                                          const BlockTiles<T>& tiles, int64_t begin) {
        const T* b[COLS];
        int64_t ahead[COLS];
#pragma GCC unroll 8
        for (int c = 0; c < COLS; c++) b[c] = tiles.tile[begin + c], ahead[c] = tiles.ahead[begin + c];
        run<ROWS, COLS>(acc, head_dim / W, q, head_dim, b, TILE_KEYS * W, ahead);
    }
    template <int ROWS, int COLS>
    static inline __attribute__((always_inline)) void values(F16 (&acc)[ROWS][COLS], const T* p, int64_t steps,
                                                            int64_t head_dim, const BlockTiles<T>& tiles, int64_t column) {
        constexpr int64_t tile_steps = TILE_KEYS / W;
        for (int64_t s = 0, t = 0; s < steps; s += tile_steps, t++) {
            const T* b[COLS];
            int64_t ahead[COLS];
#pragma GCC unroll 8
            for (int c = 0; c < COLS; c++) b[c] = tiles.tile[t] + (column + c * LANES) * W, ahead[c] = tiles.ahead[t];
            run<ROWS, COLS>(acc, min_of(steps - s, tile_steps), p + s * W, BLOCK_KEYS, b, head_dim * W, ahead);
        }
    }
};

#if defined(__AVX512VBMI__)
struct InRegisters {
    typedef uint8_t Cell;
    // Two steps (BOTH) or the first of a group for every column.
    template <int ROWS, int COLS, bool BOTH>
    static inline __attribute__((always_inline)) void add(F16 (&acc)[ROWS][COLS], const Decoder& decoder, const bf16* a,
                                                         int64_t a_stride, const uint8_t* const (&b)[COLS],
                                                         const int64_t (&ahead)[COLS]) {
#pragma GCC unroll 8
        for (int c = 0; c < COLS; c++) {
            __builtin_prefetch(b[c] + ahead[c], 0, 2);
            P16 low, high;
            decoder.pair(_mm512_loadu_si512(b[c]), low, high);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                acc[r][c] = dot_pairs(acc[r][c], set1_pair(a + r * a_stride), low);
                if (BOTH) acc[r][c] = dot_pairs(acc[r][c], set1_pair(a + r * a_stride + 2), high);
            }
        }
    }
    template <int ROWS, int COLS>
    static inline __attribute__((always_inline)) void keys(F16 (&acc)[ROWS][COLS], const bf16* q, int64_t head_dim,
                                                          const BlockTiles<uint8_t>& tiles, int64_t begin) {
        const Decoder decoder = GroupDecoder::shared().decoder;
        const uint8_t* b[COLS];
        int64_t ahead[COLS];
#pragma GCC unroll 8
        for (int c = 0; c < COLS; c++) b[c] = tiles.tile[begin + c], ahead[c] = tiles.ahead[begin + c];
        for (int64_t d = 0; d < head_dim; d += 4) {
            add<ROWS, COLS, true>(acc, decoder, q + d, head_dim, b, ahead);
#pragma GCC unroll 8
            for (int c = 0; c < COLS; c++) b[c] += GROUP;
        }
    }
    template <int ROWS, int COLS>
    static inline __attribute__((always_inline)) void values(F16 (&acc)[ROWS][COLS], const bf16* p, int64_t steps,
                                                            int64_t head_dim, const BlockTiles<uint8_t>& tiles,
                                                            int64_t column) {
        const Decoder decoder = GroupDecoder::shared().decoder;
        const int64_t first = column / LANES * GROUP, stride = 4 * head_dim;
        for (int64_t s = 0; s < steps; s += 2) {  // four groups of steps in a tile
            const uint8_t* b[COLS];
            int64_t ahead[COLS];
#pragma GCC unroll 8
            for (int c = 0; c < COLS; c++) {
                b[c] = tiles.tile[s / 8] + s % 8 / 2 * stride + first + c * GROUP;
                ahead[c] = tiles.ahead[s / 8];
            }
            if (s + 1 < steps) add<ROWS, COLS, true>(acc, decoder, p + s * 2, BLOCK_KEYS, b, ahead);
            else add<ROWS, COLS, false>(acc, decoder, p + s * 2, BLOCK_KEYS, b, ahead);
        }
    }
};
constexpr int64_t IN_REGISTERS_ROWS = 16;  // up to so many query rows per item it is faster to decode as they read
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
};

}  // namespace
}  // namespace zg
