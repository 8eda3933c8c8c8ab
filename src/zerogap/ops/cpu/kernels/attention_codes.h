// Where keys and values stand in pages, and what FP8 adds to attention: quantised rows, tiles of codes, scales.
#pragma once
#include "attention.h"
#include "e4m3.h"

namespace zg {
namespace {

struct Tiles {  // where the keys of one sequence and KV head stand
    const int32_t* pages;  // page of each page_size keys
    int64_t page_size, head, num_kv_heads, head_dim;
    int64_t row(int64_t key) const {  // of the key at absolute position `key` among all rows of all pages
        return (pages[key / page_size] * num_kv_heads + head) * page_size + key % page_size;
    }
    int64_t offset(int64_t key) const { return row(key) * head_dim; }  // of the tile that starts at `key`, in elements
};

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

// What a call computes with: type of rows, pages of the same (Dense) or of codes with scales; MATH: FP8 operands.
template <class T> struct Dense {
    typedef T Row;
    static constexpr bool SCALED = false, MATH = false;
};
template <bool FP8_MATH> struct Coded {
    typedef bf16 Row;
    static constexpr bool SCALED = true, MATH = FP8_MATH;
};

}  // namespace
}  // namespace zg
