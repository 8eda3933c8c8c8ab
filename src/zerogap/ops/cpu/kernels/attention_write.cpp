// Keys and values into their pages, as they are or as codes, and the largest magnitudes that calibrated scales need.
#include "attention_codes.h"

namespace zg {
namespace {

// Calls write(tiles, source) for every row and KV head: the head's Tiles, and the element its row starts at in k and v.
template <class Write> void over_rows(const KVWriteArgs& a, int64_t begin, int64_t end, Write&& write) {
    for (int64_t row = begin; row < end; row++) {
        Tiles tiles{a.page_table + a.sequences[row] * a.table_width, a.page_size, 0, a.num_kv_heads, a.page_stride};
        for (tiles.head = 0; tiles.head < a.num_kv_heads; tiles.head++)
            write(tiles, int64_t(a.positions[row]), (row * a.num_kv_heads + tiles.head) * a.head_dim);
    }
}

template <class T> void write_dense(const KVWriteArgs& a, int64_t begin, int64_t end) {
    constexpr int W = Step<T>::WIDTH;
    const int64_t D = a.head_dim;
    over_rows(a, begin, end, [&](const Tiles& tiles, int64_t position, int64_t source) {
        const int64_t in_tile = position % TILE_KEYS;
        const Tiles::Place tile = tiles(position - in_tile);
        const T *k = static_cast<const T*>(a.k) + source, *v = static_cast<const T*>(a.v) + source;
        T* keys = at_place<T>(a.key_pages, tile, D) + in_tile * W;
        T* values = at_place<T>(a.value_pages, tile, D) + in_tile / W * D * W + in_tile % W;
        for (int64_t d = 0; d < D; d += W) memcpy(keys + d * TILE_KEYS, k + d, sizeof(T) * W);
        for (int64_t d = 0; d < D; d++) values[d * W] = v[d];
    });
}

// The scale of one row: its own, which is stored, or the given one of its KV head.
float scale_of(const KVWriteArgs& a, const bf16* x, float* scales, const Tiles& tiles, int64_t position) {
    if (a.format == KV_CALIBRATED) return given_scale(scales[tiles.head]);
    return *at_place<float>(scales, tiles(position), 1) = row_scale(x, a.head_dim, a.pow2);
}

void write_codes(const KVWriteArgs& a, int64_t begin, int64_t end) {
    const int64_t D = a.head_dim;
    over_rows(a, begin, end, [&](const Tiles& tiles, int64_t position, int64_t source) {
        const int64_t in_tile = position % TILE_KEYS;
        const Tiles::Place tile = tiles(position - in_tile);
        const bf16 *k = static_cast<const bf16*>(a.k) + source, *v = static_cast<const bf16*>(a.v) + source;
        uint8_t *keys = at_place<uint8_t>(a.key_pages, tile, D), *values = at_place<uint8_t>(a.value_pages, tile, D);
        const F16 key_scale = set1(scale_of(a, k, a.key_scales, tiles, position));
        const F16 value_scale = set1(scale_of(a, v, a.value_scales, tiles, position));
        for (int64_t d = 0; d < D; d += LANES) {
            uint8_t codes[LANES];
            encode(codes, unscaled(load(k + d), key_scale));
            for (int64_t i = 0; i < LANES; i += 2) memcpy(keys + key_code(in_tile, d + i), codes + i, 2);
            encode(codes, unscaled(load(v + d), value_scale));
            uint8_t* group = values + value_code(in_tile, d, D);
            for (int64_t i = 0; i < LANES; i++) group[i / 4 * 16 + i % 4 * 2] = codes[i];
        }
    });
}

template <class T> void add_amax(const KVAmaxArgs& a, int64_t begin, int64_t end) {
    const int64_t D = a.head_dim;
    for (int64_t head = 0; head < a.num_kv_heads; head++) {
        F16 lanes = zero();
        for (int64_t row = begin; row < end; row++) {
            const T* k = static_cast<const T*>(a.k) + (row * a.num_kv_heads + head) * D;
            for (int64_t d = 0; d < D; d += LANES) lanes = larger_magnitude(lanes, load(k + d));
        }
        raise_magnitude(a.amax + head, lane_largest(lanes));
    }
}

}  // namespace

void run_kv_write(const void* args, Team& team) {
    const KVWriteArgs& a = *static_cast<const KVWriteArgs*>(args);
    for (int64_t item; (item = team.next(0)) * TILE_KEYS < a.rows;) {
        const int64_t begin = item * TILE_KEYS, end = min_of(a.rows, begin + TILE_KEYS);
        if (a.format) write_codes(a, begin, end);
        else if (a.storage) write_dense<bf16>(a, begin, end);
        else write_dense<float>(a, begin, end);
    }
}

void run_kv_amax(const void* args, Team& team) {
    const KVAmaxArgs& a = *static_cast<const KVAmaxArgs*>(args);
    const int64_t rows = max_of(TILE_KEYS, (1 << 16) / (a.num_kv_heads * a.head_dim));
    for (int64_t item; (item = team.next(0)) * rows < a.rows;) {
        const int64_t begin = item * rows, end = min_of(a.rows, begin + rows);
        if (a.storage) add_amax<bf16>(a, begin, end); else add_amax<float>(a, begin, end);
    }
}

}  // namespace zg
