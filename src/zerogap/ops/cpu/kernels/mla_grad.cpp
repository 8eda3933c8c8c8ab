// Latent attention backward over the rows of packed samples (formulas and order: ops/mla.py).
//
// As attention_grad.cpp, for one KV head whose values are the first columns of its keys: an item is a tile of 64 keys
// and walks the query heads and, for each, the query tiles from its own to the last of the sample. dK and dV stay apart
// until the trees over leaves are finished. dQ's order, key tiles ascending, is kept by a count per (query tile, head).
// Items are claimed in ascending order and the lowest unfinished one never waits, so this ends with any number of
// threads.
#include "mla.h"
#include "attention_grad.h"
#include <initializer_list>

namespace zg {
namespace {

// Part of the workspace that belongs to one (tile, query head); D = latent + rope.
template <class T> struct HeadTile {
    T *q_lanes, *d_out_lanes;  // [D / W][64 rows][W], [latent / W][64 rows][W]
    T *q_rows, *d_out_rows;    // [64 / W][D][W], [64 / W][latent][W]
    float* dq;                 // [D][64 rows]
    float *lse, *delta;        // [64]
    int32_t* progress;         // key tiles that have been added to dq
    HeadTile(const LatentGradArgs& a, int64_t tile, int64_t head) {
        const int64_t latent = a.latent_size, D = latent + a.rope_size;
        Carver carver{static_cast<char*>(a.workspace) +
                      (tile * a.num_heads + head) * latent_grad_bytes(latent, a.rope_size, sizeof(T) == 2)};
        q_lanes = carver.take<T>(TILE * D);
        d_out_lanes = carver.take<T>(TILE * latent);
        q_rows = carver.take<T>(TILE * D);
        d_out_rows = carver.take<T>(TILE * latent);
        dq = carver.take<float>(TILE * D);
        lse = carver.take<float>(TILE);
        delta = carver.take<float>(TILE);
        progress = carver.take<int32_t>(1);
    }
};

// Rows of `width` at `stride` into columns of 64 rows of D; missing rows are zero.
template <class T>
void gather(const void* source, int64_t stride, int64_t rows, int64_t width, T* out, int64_t D) {
    for (int64_t r = 0; r < TILE; r++) {
        if (r < rows) memcpy(out + r * D, static_cast<const T*>(source) + r * stride, width * sizeof(T));
        else memset(out + r * D, 0, width * sizeof(T));
    }
}

template <class T> void prepare(const LatentGradArgs& a, int64_t tile, int64_t head, T* rows) {
    const int64_t latent = a.latent_size, rope = a.rope_size, D = latent + rope;
    const Span span = find_tile(a.sample_starts, tile);
    const int64_t first = span.begin * a.num_heads + head, stride = a.num_heads * latent;
    HeadTile<T> work(a, tile, head);
    gather<T>(static_cast<const T*>(a.q_latent) + first * latent, stride, span.rows, latent, rows, D);
    gather<T>(static_cast<const T*>(a.q_rope) + first * rope, a.num_heads * rope, span.rows, rope, rows + latent, D);
    pair_rows(rows, TILE, D, work.q_rows);
    spread_rows(rows, D, work.q_lanes);
    gather<T>(static_cast<const T*>(a.d_out) + first * latent, stride, span.rows, latent, rows, latent);
    pair_rows(rows, TILE, latent, work.d_out_rows);
    spread_rows(rows, latent, work.d_out_lanes);
    for (int64_t r = 0; r < TILE; r++) {
        work.lse[r] = work.delta[r] = 0;
        if (r >= span.rows) continue;
        const T* out = static_cast<const T*>(a.out) + first * latent + r * stride;
        F16 sum = zero();
        for (int64_t d = 0; d < latent; d += LANES) sum = fma(load(out + d), load(rows + r * latent + d), sum);
        work.delta[r] = lane_sum(sum);
        work.lse[r] = a.lse[(span.begin + r) * a.num_heads + head];
    }
    memset(work.dq, 0, TILE * D * sizeof(float));
    *work.progress = 0;
}

// This thread's memory for one item.
template <class T> struct Item {
    T *k, *k_steps, *k_columns;  // [64][D] rows as attention reads them, [64 / W][D][W], [D][64]
    float* rows;                 // [64][D]
    float *s, *dp, *dot;         // [64 keys][64 queries]
    T *p, *ds;                   // the same
    T* ds_steps;                 // [tiles or 0, and one unscaled][64 keys / W][64 queries][W]
    T* ds_scaled;                // [64 keys][64 queries]
    float* ds_exact;             // the same, before it is rounded
    float* scales;               // codes: [64][tiles]
    float *dk, *dv;              // [leaves][64][D], [leaves][64][latent]
    static int64_t bytes(int64_t latent, int64_t D, int64_t tiles, int64_t leaves) {
        const int64_t size = sizeof(T);
        const int64_t squares = TILE * ((4 + tiles) * size + 16), sums = leaves * (D + latent) * 4;
        return TILE * (D * (3 * size + 4) + squares + tiles * 4 + sums) + 16 * 64;
    }
    void carve(char* memory, int64_t latent, int64_t D, int64_t tiles, int64_t leaves) {
        Carver carver{memory};
        for (T** part : {&k, &k_steps, &k_columns}) *part = carver.take<T>(TILE * D);
        rows = carver.take<float>(TILE * D);
        for (float** part : {&s, &dp, &dot, &ds_exact}) *part = carver.take<float>(TILE * TILE);
        for (T** part : {&p, &ds, &ds_scaled}) *part = carver.take<T>(TILE * TILE);
        ds_steps = carver.take<T>((tiles + 1) * TILE * TILE);
        scales = carver.take<float>(TILE * tiles);
        dk = carver.take<float>(leaves * TILE * D);
        dv = carver.take<float>(leaves * TILE * latent);
    }
};

// Codes: the latents of 64 rows to grid values with their scales, as latent_write made them.
void quantise_latents(const LatentGradArgs& a, bf16* rows, int64_t D, float* scales) {
    const int64_t tiles = latent_tiles(a.latent_size);
    for (int64_t r = 0; r < TILE; r++)
        for (int64_t tile = 0; tile < tiles; tile++) {
            bf16* x = rows + r * D + tile * LATENT_TILE;
            const int64_t width = tile_end(tile, a.latent_size) - tile * LATENT_TILE;
            const float scale = a.format == KV_PER_TOKEN ? row_scale(x, width, a.pow2) : given_scale(a.scales[tile]);
            quantise_row(x, width, scale, x);
            scales[r * tiles + tile] = scale;
        }
}

template <class T> void load_keys(const LatentGradArgs& a, const Span& keys, Item<T>& item) {
    const int64_t latent = a.latent_size, rope = a.rope_size, D = latent + rope;
    gather<T>(static_cast<const T*>(a.latent) + keys.begin * latent, latent, keys.rows, latent, item.k, D);
    gather<T>(static_cast<const T*>(a.rope) + keys.begin * rope, rope, keys.rows, rope, item.k + latent, D);
    if constexpr (sizeof(T) == 2)
        if (a.format) quantise_latents(a, item.k, D, item.scales);
    pair_rows(item.k, TILE, D, item.k_steps);
    transpose(words(item.k_steps), TILE / Step<T>::WIDTH, D, words(item.k_columns));
}

// total (first: of +0) = fma(dot, scale of the key's tile, total) for all 64 x 64.
void add_scaled(const float* dot, const float* scales, int64_t tiles, int64_t keys, bool first, float* total) {
    for (int64_t r = 0; r < keys; r++)
        for (int64_t c = 0; c < TILE; c += LANES) {
            float* at = total + r * TILE + c;
            store(at, fma(load(dot + r * TILE + c), set1(scales[r * tiles]), first ? zero() : load(at)));
        }
}

// s and dp of 64 keys and 64 queries, by the forward's chains: s over latent and rotated part, dp over the latent.
template <class T>
void score_tile(const LatentGradArgs& a, const HeadTile<T>& work, Item<T>& item, int64_t keys) {
    constexpr int64_t W = Step<T>::WIDTH;
    const int64_t latent = a.latent_size, D = latent + a.rope_size;
    if (!a.format) {
        multiply<T>(keys, item.k, D, D / W, work.q_lanes, TILE, item.s, true);
        multiply<T>(keys, item.k, D, latent / W, work.d_out_lanes, TILE, item.dp, true);
        return;
    }
    const int64_t tiles = latent_tiles(latent);
    for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t begin = tile * LATENT_TILE, steps = (tile_end(tile, latent) - begin) / W;
        multiply<T>(keys, item.k + begin, D, steps, work.q_lanes + begin * TILE, TILE, item.dot, true);
        add_scaled(item.dot, item.scales + tile, tiles, keys, tile == 0, item.s);
        multiply<T>(keys, item.k + begin, D, steps, work.d_out_lanes + begin * TILE, TILE, item.dot, true);
        add_scaled(item.dot, item.scales + tile, tiles, keys, tile == 0, item.dp);
    }
    multiply<T>(keys, item.k + latent, D, (D - latent) / W, work.q_lanes + latent * TILE, TILE, item.dot, true);
    for (int64_t i = 0; i < keys * TILE; i += LANES) store(item.s + i, load(item.s + i) + load(item.dot + i));
}

// p = rn(exp(s * scale - lse)), ds = rn((p32 * (dp - delta)) * scale), +0 where query < key or either is missing; ds as
// steps over keys, for codes also times the scale of the key's tile, rn(ds32 * scale), for every tile.
template <class T>
void soften_tile(const LatentGradArgs& a, const HeadTile<T>& work, Item<T>& item, int64_t keys, int64_t queries,
                 bool diagonal) {
    const F16 factor = set1(a.scale);
    for (int64_t r = 0; r < TILE; r++)
        for (int64_t c = 0; c < TILE; c += LANES) {
            const int64_t at = r * TILE + c, skip = r < keys ? (diagonal ? max_of(0, r - c) : 0) : LANES;
            F16 p = zero(), ds = zero();
            if (skip < LANES && c < queries) {
                p = exp(load(item.s + at) * factor - load(work.lse + c));
                ds = p * (load(item.dp + at) - load(work.delta + c)) * factor;
                p = select(first_n(skip), zero(), select(first_n(queries - c), p, zero()));
                ds = select(first_n(skip), zero(), select(first_n(queries - c), ds, zero()));
            }
            store(item.p + at, p);
            store(item.ds + at, ds);
            if (a.format) store(item.ds_exact + at, ds);
        }
    const int64_t tiles = a.format ? latent_tiles(a.latent_size) : 0;
    for (int64_t tile = 0; tile < tiles; tile++) {
        for (int64_t at = 0; at < TILE * TILE; at += LANES)
            store(item.ds_scaled + at, load(item.ds_exact + at) * set1(item.scales[at / TILE * tiles + tile]));
        pair_rows(item.ds_scaled, TILE, TILE, item.ds_steps + tile * TILE * TILE);
    }
    pair_rows(item.ds, TILE, TILE, item.ds_steps + tiles * TILE * TILE);
}

// dq += ds k for one key tile, in the layout [D][64 queries].
template <class T>
void add_query_grads(const LatentGradArgs& a, const HeadTile<T>& work, const Item<T>& item, int64_t keys) {
    constexpr int64_t W = Step<T>::WIDTH;
    const int64_t latent = a.latent_size, D = latent + a.rope_size, tiles = a.format ? latent_tiles(latent) : 0;
    const int64_t steps = ceil_div(keys, W);
    int64_t begin = 0;
    for (int64_t part = 0; part <= tiles; part++) {
        const int64_t end = part == tiles ? D : tile_end(part, latent);
        multiply<T>(end - begin, item.k_columns + begin * TILE, TILE, steps, item.ds_steps + part * TILE * TILE, TILE,
                    work.dq + begin * TILE, false);
        begin = end;
    }
}

template <class T>
void put_query_grads(const LatentGradArgs& a, const HeadTile<T>& work, float* rows, const Span& span, int64_t head) {
    const int64_t latent = a.latent_size, rope = a.rope_size, D = latent + rope;
    transpose(words(work.dq), D, TILE, words(rows));
    for (int64_t r = 0; r < span.rows; r++) {
        const int64_t at = (span.begin + r) * a.num_heads + head;
        for (int64_t d = 0; d < latent; d += LANES)
            store(static_cast<T*>(a.dq_latent) + at * latent + d, load(rows + r * D + d));
        for (int64_t d = 0; d < rope; d += LANES)
            store(static_cast<T*>(a.dq_rope) + at * rope + d, load(rows + r * D + latent + d));
    }
}

// One (key tile, query tile, head): adds to dk, dv (of the open leaf) and to the query tile's dq.
template <class T>
void add_tile(const LatentGradArgs& a, Item<T>& item, const Span& keys, int64_t tile, const Span& queries, int64_t head,
              float* dk, float* dv, bool first) {
    constexpr int64_t W = Step<T>::WIDTH;
    const int64_t latent = a.latent_size, D = latent + a.rope_size, steps = ceil_div(queries.rows, W);
    HeadTile<T> work(a, tile, head);
    score_tile(a, work, item, keys.rows);
    soften_tile(a, work, item, keys.rows, queries.rows, keys.index == queries.index);
    multiply<T>(keys.rows, item.p, TILE, steps, work.d_out_rows, latent, dv, first);
    multiply<T>(keys.rows, item.ds, TILE, steps, work.q_rows, D, dk, first);
    wait_for(work.progress, int32_t(keys.index));
    add_query_grads(a, work, item, keys.rows);
    if (keys.index == queries.index) put_query_grads(a, work, item.rows, queries, head);
    __atomic_store_n(work.progress, int32_t(keys.index + 1), __ATOMIC_RELEASE);
}

// Gradients of 64 rows: dK + dV, of the rotated part dK alone. Calibrated codes: +0 where the element was clipped.
template <class T> void store_grads(const LatentGradArgs& a, const Span& keys, const float* dk, const float* dv) {
    const int64_t latent = a.latent_size, rope = a.rope_size, D = latent + rope;
    for (int64_t r = 0; r < keys.rows; r++) {
        const T* x = static_cast<const T*>(a.latent) + (keys.begin + r) * latent;
        for (int64_t d = 0; d < latent; d += LANES) {
            F16 sum = load(dk + r * D + d) + load(dv + r * latent + d);
            if (a.format == KV_CALIBRATED) {
                const F16 scale = set1(given_scale(a.scales[d / LATENT_TILE]));
                sum = select(less(set1(E4M3_MAX), abs(load(x + d) / scale)), zero(), sum);
            }
            store(static_cast<T*>(a.d_latent) + (keys.begin + r) * latent + d, sum);
        }
        for (int64_t d = 0; d < rope; d += LANES)
            store(static_cast<T*>(a.d_rope) + (keys.begin + r) * rope + d, load(dk + r * D + latent + d));
    }
}

template <class T> void key_item(const LatentGradArgs& a, Item<T>& item, int64_t tile) {
    const int64_t latent = a.latent_size, D = latent + a.rope_size, per_leaf = a.num_heads / a.leaves;
    const Span keys = find_tile(a.sample_starts, tile);
    load_keys(a, keys, item);
    for (int64_t head = 0; head < a.num_heads; head++) {
        const int64_t leaf = head / per_leaf;
        bool first = head % per_leaf == 0;  // a new chain
        for (int64_t index = keys.index; index <= keys.last; index++) {
            const Span queries = find_tile(a.sample_starts, tile + index - keys.index);
            add_tile(a, item, keys, tile + index - keys.index, queries, head, item.dk + leaf * TILE * D,
                     item.dv + leaf * TILE * latent, first);
            first = false;
        }
    }
    const float* dk = tree_sum(item.dk, TILE * D, 0, a.leaves, 0, a.leaves);
    const float* dv = tree_sum(item.dv, TILE * latent, 0, a.leaves, 0, a.leaves);
    store_grads<T>(a, keys, dk, dv);
}

template <class T> void differentiate(const LatentGradArgs& a, Team& team) {
    const int64_t latent = a.latent_size, D = latent + a.rope_size, tiles = a.format ? latent_tiles(latent) : 0;
    Item<T> item;
    char* memory = static_cast<char*>(team.scratch_bytes(Item<T>::bytes(latent, D, tiles, a.leaves)));
    item.carve(memory, latent, D, tiles, a.leaves);
    for (int64_t i; (i = team.next(0)) < a.num_tiles * a.num_heads;)
        prepare<T>(a, i / a.num_heads, i % a.num_heads, item.k);
    team.barrier();
    for (int64_t i; (i = team.next(1)) < a.num_tiles;) key_item<T>(a, item, i);
}

}  // namespace

void run_latent_grad(const void* args, Team& team) {
    const LatentGradArgs& a = *static_cast<const LatentGradArgs*>(args);
    if (a.storage) differentiate<bf16>(a, team); else differentiate<float>(a, team);
}

}  // namespace zg
