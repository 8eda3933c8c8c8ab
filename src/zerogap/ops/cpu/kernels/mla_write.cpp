// Latent rows into their pages, as they are or as codes, and the largest magnitudes that calibrated scales need.
#include "mla.h"

namespace zg {
namespace {

Tiles pages_of(const LatentWriteArgs& a, int64_t row) {
    return {a.page_table + a.sequences[row] * a.table_width, a.page_size, 0, 1, a.page_stride};
}

template <class T> void write_dense(const LatentWriteArgs& a, int64_t row, Tiles::Place place) {
    const int64_t latent = a.latent_size;
    const T* from = static_cast<const T*>(a.latent) + row * latent;
    memcpy(at_place<T>(a.latent_pages, place, latent), from, latent * sizeof(T));
}

void write_codes(const LatentWriteArgs& a, int64_t row, Tiles::Place place) {
    const int64_t latent = a.latent_size, tiles = latent_tiles(latent);
    const bf16* x = static_cast<const bf16*>(a.latent) + row * latent;
    uint8_t* codes = at_place<uint8_t>(a.latent_pages, place, latent);
    for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t begin = tile * LATENT_TILE, end = tile_end(tile, latent);
        float scale;
        if (a.format == KV_CALIBRATED) scale = given_scale(a.scales[tile]);
        else at_place<float>(a.scales, place, tiles)[tile] = scale = row_scale(x + begin, end - begin, a.pow2);
        for (int64_t d = begin; d < end; d += LANES) {
            uint8_t made[LANES];
            encode(made, unscaled(load(x + d), set1(scale)));
            for (int64_t i = 0; i < LANES; i += 8) memcpy(codes + latent_code(d + i, latent), made + i, 8);
        }
    }
}

template <class T> void write_rows(const LatentWriteArgs& a, int64_t begin, int64_t end) {
    const int64_t rope = a.rope_size;
    for (int64_t row = begin; row < end; row++) {
        const Tiles::Place place = pages_of(a, row)(a.positions[row]);
        if (a.format) write_codes(a, row, place); else write_dense<T>(a, row, place);
        memcpy(at_place<T>(a.rope_pages, place, rope), static_cast<const T*>(a.rope) + row * rope, rope * sizeof(T));
    }
}

template <class T> void add_amax(const LatentAmaxArgs& a, int64_t begin, int64_t end) {
    const int64_t latent = a.latent_size;
    for (int64_t tile = 0; tile < latent_tiles(latent); tile++) {
        F16 lanes = zero();
        for (int64_t row = begin; row < end; row++)
            for (int64_t d = tile * LATENT_TILE; d < tile_end(tile, latent); d += LANES)
                lanes = larger_magnitude(lanes, load(static_cast<const T*>(a.latent) + row * latent + d));
        raise_magnitude(a.amax + tile, lane_largest(lanes));
    }
}

}  // namespace

void run_latent_write(const void* args, Team& team) {
    const LatentWriteArgs& a = *static_cast<const LatentWriteArgs*>(args);
    for (int64_t item; (item = team.next(0)) * TILE_KEYS < a.rows;) {
        const int64_t begin = item * TILE_KEYS, end = min_of(a.rows, begin + TILE_KEYS);
        if (a.storage) write_rows<bf16>(a, begin, end); else write_rows<float>(a, begin, end);
    }
}

void run_latent_amax(const void* args, Team& team) {
    const LatentAmaxArgs& a = *static_cast<const LatentAmaxArgs*>(args);
    const int64_t rows = max_of(TILE_KEYS, (1 << 16) / a.latent_size);
    for (int64_t item; (item = team.next(0)) * rows < a.rows;) {
        const int64_t begin = item * rows, end = min_of(a.rows, begin + rows);
        if (a.storage) add_amax<bf16>(a, begin, end); else add_amax<float>(a, begin, end);
    }
}

}  // namespace zg
