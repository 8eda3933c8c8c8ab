// Latent attention over paged rows, forward and backward (docs/numerics.md, "latent attention"; ops/mla.py says the
// formulas). This header holds the argument structs and where rows stand in pages.
#pragma once
#include "attention_codes.h"

namespace zg {

// A token's row is its latent (keys and values of all heads) and its rotated part (keys only). A page holds, one after
// the other and page_stride bytes from those of the next page:
//   latents  [page_size][latent] storage dtype, or codes of a byte
//   rotated  [page_size][rope] storage dtype (BF16 beside codes)
//   scales   FP32 [page_size][tiles], with KV_PER_TOKEN only; KV_CALIBRATED gives FP32 [tiles] from outside
// Codes have a scale per tile of LATENT_TILE elements, the last one ragged. Whole groups of 64 codes stand in the order
// that GroupDecoder turns into theirs (latent_code). What no row was written to may hold anything.
constexpr int64_t LATENT_TILE = 128;
static inline int64_t latent_tiles(int64_t latent) { return ceil_div(latent, LATENT_TILE); }
static inline int64_t latent_code(int64_t d, int64_t latent) {
    const int64_t in = d % GROUP;
    return d < latent / GROUP * GROUP ? d - in + in % 32 / 8 * 16 + in / 32 * 8 + in % 8 : d;
}

// Stores the row of each token at its absolute position.
struct LatentWriteArgs {
    int64_t rows;
    const void *latent, *rope;  // [rows, latent], [rows, rope] storage dtype
    const int32_t *positions, *sequences;
    const int32_t* page_table;
    int64_t table_width;
    void *latent_pages, *rope_pages;
    float* scales;  // as `format` says: written, only read, or null
    int64_t page_stride;
    int32_t latent_size, rope_size, page_size, storage;
    int32_t format, pow2;  // KVFormat; scales are rounded up to powers of two
};
void run_latent_write(const void* args, Team& team);

// amax[t] = max(amax[t], |latent|) over the rows of tile t; NaN counts as the largest.
struct LatentAmaxArgs {
    int64_t rows;
    const void* latent;  // [rows, latent] storage dtype
    float* amax;         // [tiles]
    int32_t latent_size, storage;
};
void run_latent_amax(const void* args, Team& team);

struct LatentAttentionArgs {
    int64_t rows;
    const void *q_latent, *q_rope;  // [rows, num_heads * latent], [rows, num_heads * rope] storage dtype
    const int32_t *positions, *sequences;
    const int32_t* page_table;
    int64_t table_width;
    const void *latent_pages, *rope_pages;
    const float* scales;
    int64_t page_stride;
    void* out;   // [rows, num_heads * latent] storage dtype
    float* lse;  // [rows, num_heads] m + log(l), or null
    int32_t num_heads, latent_size, rope_size, page_size, kv_split, storage;
    int32_t format;
    float scale;
};
void run_latent_attention(const void* args, Team& team);

struct LatentGradArgs {
    int64_t rows;
    const void *q_latent, *q_rope, *latent, *rope, *out, *d_out;  // as above, latent and rope as given to latent_write
    const float* scales;  // calibrated: [tiles]; else null, and found anew from the rows
    const float* lse;
    const int32_t* sample_starts;  // [num_samples + 1]; every sample starts at position 0
    int64_t num_samples, num_tiles;  // num_tiles: sum over samples of ceil(length / 64)
    void *dq_latent, *dq_rope, *d_latent, *d_rope;  // storage dtype
    void* workspace;  // num_tiles * num_heads * latent_grad_bytes(latent, rope, storage), 64-byte aligned
    int32_t num_heads, latent_size, rope_size, leaves, storage;
    int32_t format, pow2;
    float scale;
};
void run_latent_grad(const void* args, Team& team);

// Workspace of one (tile of 64 rows, query head): q and d_out packed twice, the dQ sums, log-sum-exp, delta, progress.
constexpr int64_t latent_grad_bytes(int64_t latent, int64_t rope, bool is_bf16) {
    return BLOCK_KEYS * ((4 * latent + 2 * rope) * (is_bf16 ? 2 : 4) + (latent + rope) * 4 + 2 * 4) + 64;
}

namespace {

// One past the last element of a tile.
static inline int64_t tile_end(int64_t tile, int64_t latent) { return min_of(latent, (tile + 1) * LATENT_TILE); }

// A row of codes as the BF16 grid values of its latent.
static inline void decode_latent(const GroupDecoder& decode, const uint8_t* codes, int64_t latent, bf16* out) {
    const int64_t whole = latent / GROUP * GROUP;
    for (int64_t d = 0; d < whole; d += GROUP) decode(codes + d, out + d, out + d + GROUP / 2);
    decode_row(codes + whole, out + whole, latent - whole);
}

}  // namespace
}  // namespace zg
