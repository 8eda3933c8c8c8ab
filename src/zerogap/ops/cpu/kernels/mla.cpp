// Latent attention forward over pages: the one definition for training, prefill, chunks and decode.
//
// All query heads read the same rows. A *part* is up to 64 query rows (token, head) of one sequence, which walk over
// the blocks of keys together: scores and softmax have query rows as lanes, the value product has columns as lanes. A
// row's bits depend on its position, its own q and the rows up to its position; where last blocks differ in length the
// value product runs per length, so that no row ever multiplies a value that it may not see.
#include "mla_lanes.h"
#include "turn.h"
#include <initializer_list>

namespace zg {
namespace {

constexpr int64_t PART = 64;  // most query rows of a part

// Query rows of one sequence: row i is head first_head + i % heads of token begin + i / heads.
struct QueryRows {
    int64_t begin, heads, first_head;
    int64_t token(int64_t i) const { return begin + i / heads; }
    int64_t head(int64_t i) const { return first_head + i % heads; }
};

// Working memory of one part. Lanes beyond `count` see no key.
template <class T> struct Part {
    int64_t count, lanes, latent, rope, tiles;  // lanes: count rounded up to sixteen; tiles: scales per row, 0 dense
    int64_t position[PART];                     // ascending
    T* q;                                       // [(latent + rope) / W][lanes][W]
    float* s;                                   // [64 keys][lanes]
    T* p;                                       // [tiles or 1][64 / W][lanes][W]
    float *o, *merged;                          // [count][latent] of the open span, of the spans before it
    float *m, *l, *alpha, *merged_m, *merged_l, *seen;  // [64]; seen: keys of the block that a row sees
    T* gathered;                                // [16][latent + rope]
    T* zeros;                                   // [latent]
    T* decoded;                                 // codes: [64][latent] grid values of the block
    float* scales;                              // codes: [64][tiles]

    static constexpr int64_t W = Step<T>::WIDTH;
    void carve(char* memory, int64_t latent_size, int64_t rope_size, int64_t num_tiles) {
        Carver carver{memory};
        latent = latent_size, rope = rope_size, tiles = num_tiles;
        q = carver.take<T>(PART * (latent + rope));
        s = carver.take<float>(PART * BLOCK_KEYS);
        p = carver.take<T>(max_of(1, tiles) * PART * BLOCK_KEYS);
        o = carver.take<float>(PART * latent);
        merged = carver.take<float>(PART * latent);
        for (float** row : {&m, &l, &alpha, &merged_m, &merged_l, &seen}) *row = carver.take<float>(PART);
        gathered = carver.take<T>(LANES * (latent + rope));
        zeros = carver.take<T>(latent);
        memset(zeros, 0, latent * sizeof(T));
        decoded = carver.take<T>(tiles ? BLOCK_KEYS * latent : 0);
        scales = carver.take<float>(BLOCK_KEYS * tiles);
    }
    static int64_t bytes(int64_t latent, int64_t rope, int64_t tiles) {
        const int64_t size = sizeof(T), of_p = max_of(1, tiles) * BLOCK_KEYS * size;
        return PART * ((latent + rope) * size + BLOCK_KEYS * 4 + of_p + latent * 8 + 24) +
               (LANES * (latent + rope) + latent) * size +
               (tiles ? BLOCK_KEYS * (latent * size + tiles * 4) : 0) + 16 * 64;
    }
};

template <class T>
void take_queries(const LatentAttentionArgs& a, const QueryRows& queries, int64_t count, Part<T>& part) {
    constexpr int64_t W = Step<T>::WIDTH;
    const int64_t latent = part.latent, rope = part.rope, width = latent + rope;
    part.count = count;
    part.lanes = ceil_div(count, LANES) * LANES;
    for (int64_t first = 0; first < part.lanes; first += LANES) {
        for (int64_t i = 0; i < LANES; i++) {
            T* row = part.gathered + i * width;
            if (first + i >= count) {
                memset(row, 0, width * sizeof(T));
                continue;
            }
            const int64_t token = queries.token(first + i), at = token * a.num_heads + queries.head(first + i);
            part.position[first + i] = a.positions[token];
            memcpy(row, static_cast<const T*>(a.q_latent) + at * latent, latent * sizeof(T));
            memcpy(row + latent, static_cast<const T*>(a.q_rope) + at * rope, rope * sizeof(T));
        }
        transpose(words(part.gathered), LANES, width / W, words(part.q + first * W), part.lanes);
    }
}

// s[r][16 c + i] of KEY_ROWS keys: dense, one chain over latent and rotated part; codes, a chain per tile, each added
// as fma(chain, scale, s), that of the rotated part as it is.
template <class T, int COLS>
void score_keys(Part<T>& part, const T* latent, const T* rope, const float* scales, int64_t lane, float* s) {
    constexpr int64_t W = Step<T>::WIDTH;
    const int64_t stride = part.lanes * W;
    const T* q = part.q + lane * W;
    F16 acc[KEY_ROWS][COLS];
    clear(acc);
    if (!part.tiles) {
        add_keys<T, COLS>(acc, latent, part.latent, part.latent, q, stride);
        add_keys<T, COLS>(acc, rope, part.rope, part.rope, q + part.latent / W * stride, stride);
        for (int r = 0; r < KEY_ROWS; r++)
            for (int c = 0; c < COLS; c++) store(s + r * part.lanes + c * LANES, acc[r][c]);
        return;
    }
    for (int64_t tile = 0; tile < part.tiles; tile++) {
        const int64_t begin = tile * LATENT_TILE, width = tile_end(tile, part.latent) - begin;
        clear(acc);
        add_keys<T, COLS>(acc, latent + begin, part.latent, width, q + begin / W * stride, stride);
        for (int r = 0; r < KEY_ROWS; r++)
            for (int c = 0; c < COLS; c++) {
                float* at = s + r * part.lanes + c * LANES;
                const F16 scale = set1(scales[r * part.tiles + tile]);
                store(at, fma(acc[r][c], scale, tile ? load(at) : zero()));
            }
    }
    clear(acc);
    add_keys<T, COLS>(acc, rope, part.rope, part.rope, q + part.latent / W * stride, stride);
    for (int r = 0; r < KEY_ROWS; r++)
        for (int c = 0; c < COLS; c++) {
            float* at = s + r * part.lanes + c * LANES;
            store(at, load(at) + acc[r][c]);
        }
}

// Scores of all lanes from `first_lane` on.
template <class T> void add_scores(Part<T>& part, const BlockRows<T>& rows, int64_t keys, int64_t first_lane) {
    for (int64_t key = 0; key < keys; key += KEY_ROWS) {
        const int64_t tile = key / TILE_KEYS, in = key % TILE_KEYS;
        const T *latent = rows.latent[tile] + in * part.latent, *rope = rows.rope[tile] + in * part.rope;
        const float* scales = part.scales + key * part.tiles;
        for (int64_t lane = first_lane; lane < part.lanes;) {
            float* s = part.s + key * part.lanes + lane;
            const int64_t left = min_of((part.lanes - lane) / LANES, QUERY_LANES);
            if constexpr (QUERY_LANES == 3) {  // four are two and two
                const bool three = (part.lanes - lane) / LANES == 3;
                if (three) score_keys<T, 3>(part, latent, rope, scales, lane, s);
                else if (left >= 2) score_keys<T, 2>(part, latent, rope, scales, lane, s);
                else score_keys<T, 1>(part, latent, rope, scales, lane, s);
                lane += (three ? 3 : min_of(left, 2)) * LANES;
            } else {
                score_keys<T, 1>(part, latent, rope, scales, lane, s);
                lane += LANES;
            }
        }
    }
}

// p of one step as operands: sixteen query rows, for BF16 two keys of each side by side.
static inline void store_step(float* p, F16 first, F16) { store(p, first); }
static inline void store_step(bf16* p, F16 first, F16 second) {
    bf16 both[2][LANES];
    store(both[0], first);
    store(both[1], second);
    const P16 pairs = pair_lanes(both[0], both[1]);
    memcpy(p, &pairs, sizeof pairs);
}

// Sixteen query rows' block: s -> p (rounded to storage), m, l and alpha. FULL: all of them see all `keys` keys.
template <class T, bool FULL> void soften(Part<T>& part, int64_t lane, int64_t keys, float factor, bool first) {
    constexpr int64_t W = Step<T>::WIDTH;
    const F16 seen = load(part.seen + lane), scale = set1(factor), before = load(part.m + lane);
    float* s = part.s + lane;
    F16 m = set1(-HUGE_VALF);
    for (int64_t key = 0; key < keys; key++) {
        F16 x = load(s + key * part.lanes) * scale;
        if (!FULL) x = select(less(set1(float(key)), seen), x, set1(-HUGE_VALF));
        store(s + key * part.lanes, x);
        m = max(m, x);
    }
    if (!first) m = select(less(m, before), before, m);
    F16 sums[LANES];
    for (int64_t key = 0; key < ceil_div(keys, LANES) * LANES; key++) {
        F16 p = zero();
        if (key < keys) {
            p = exp(load(s + key * part.lanes) - m);
            if (!FULL) p = select(less(set1(float(key)), seen), p, zero());
            store(s + key * part.lanes, p);
        }
        sums[key % LANES] = key < LANES ? p : sums[key % LANES] + p;
    }
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) sums[i] = sums[i] + sums[i + half];
    for (int64_t tile = 0; tile < max_of(1, part.tiles); tile++) {
        T* p = part.p + tile * BLOCK_KEYS * part.lanes + lane * W;
        for (int64_t key = 0; key < keys; key += W) {
            F16 x[2] = {load(s + key * part.lanes), key + 1 < keys ? load(s + (key + 1) * part.lanes) : zero()};
            for (int64_t i = 0; i < min_of(W, part.tiles * (keys - key)); i++) {
                x[i] = x[i] * set1(part.scales[(key + i) * part.tiles + tile]);
                if (!FULL) x[i] = select(less(set1(float(key + i)), seen), x[i], zero());  // it may be NaN
            }
            store_step(p + key * part.lanes, x[0], x[1]);
        }
    }
    const M16 live = less(zero(), seen);
    const F16 l = load(part.l + lane);
    const M16 rises = less(before, m);
    F16 alpha = first ? zero() : select(rises, exp(before - m), set1(1.0f));
    store(part.alpha + lane, alpha);
    store(part.l + lane, select(live, first ? sums[0] : fma(l, alpha, sums[0]), l));
    store(part.m + lane, select(live, m, before));
}

// Adds the open span of row r to the spans before it.
template <class T> void merge(Part<T>& part, int64_t r, bool first) {
    const int64_t latent = part.latent;
    float *into = part.merged + r * latent, *from = part.o + r * latent;
    if (first) {
        memcpy(into, from, latent * sizeof(float));
        part.merged_m[r] = part.m[r];
        part.merged_l[r] = part.l[r];
        return;
    }
    const float m = part.merged_m[r] > part.m[r] ? part.merged_m[r] : part.m[r];
    const float a1 = exp_one(part.merged_m[r] - m), a2 = exp_one(part.m[r] - m);
    for (int64_t d = 0; d < latent; d += LANES)
        store(into + d, fma(load(into + d), set1(a1), load(from + d) * set1(a2)));
    part.merged_l[r] = fma_one(part.merged_l[r], a1, part.l[r] * a2);
    part.merged_m[r] = m;
}

// o[r] = PV (first) or fma(o[r], alpha[r], PV): PV is one chain over the block's first `keys` keys from +0. The partner
// that an odd last key lacks counts as zero.
template <class T> struct ValueProduct {
    const Part<T>& part;
    const BlockRows<T>& rows;
    int64_t row, keys, column;
    bool first;
    template <int ROWS, int COLS> void call() {
        constexpr int W = Step<T>::WIDTH;
        const int64_t latent = part.latent, stride = part.lanes * W;
        const T* p = part.p + (part.tiles ? column / LATENT_TILE : 0) * BLOCK_KEYS * part.lanes + row * W;
        F16 acc[ROWS][COLS];
        clear(acc);
        for (int64_t key = 0; key < keys; key += TILE_KEYS) {
            const T* values = rows.latent[key / TILE_KEYS] + column;
            const int64_t count = min_of(TILE_KEYS, keys - key);
            for (int64_t i = 0; i < count; i += W, p += stride, values += W * latent) {
                typename Step<T>::Lanes lanes[COLS];
                value_lanes<COLS>(values, W == 1 || i + 1 < count ? values + latent : part.zeros, lanes);
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; r++) {
                    const typename Step<T>::Lanes word = Step<T>::spread(p + r * W);
#pragma GCC unroll 8
                    for (int c = 0; c < COLS; c++) acc[r][c] = Step<T>::add(acc[r][c], word, lanes[c]);
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
            for (int c = 0; c < COLS; c++) {
                float* out = part.o + (row + r) * latent + column + c * LANES;
                store(out, first ? acc[r][c] : fma(load(out), set1(part.alpha[row + r]), acc[r][c]));
            }
    }
};

template <int ROWS, class F> void with_lanes(int64_t cols, F& function) {
    if constexpr (VALUE_LANES >= 2) if (cols == 2) return function.template call<ROWS, 2>();
    function.template call<ROWS, 1>();
}
template <class F> void with_rows(int64_t rows, int64_t cols, F& function) {
    switch (rows) {
        case 1: return with_lanes<1>(cols, function);
        case 2: return with_lanes<2>(cols, function);
        case 3: return with_lanes<3>(cols, function);
    }
    if constexpr (VALUE_ROWS >= 4) if (rows == 4) return with_lanes<4>(cols, function);
    if constexpr (VALUE_ROWS >= 8) switch (rows) {
        case 5: return with_lanes<5>(cols, function);
        case 6: return with_lanes<6>(cols, function);
        case 7: return with_lanes<7>(cols, function);
        case 8: return with_lanes<8>(cols, function);
    }
}

// The value product of one block for every row that sees it, rows with equally many keys together.
template <class T> void add_values(Part<T>& part, const BlockRows<T>& rows, int64_t block, bool first) {
    const int64_t vectors = part.latent / LANES;
    for (int64_t v = 0; v < vectors; v += VALUE_LANES) {
        const int64_t cols = min_of(VALUE_LANES, vectors - v);
        for (int64_t r = 0; r < part.count;) {
            const int64_t keys = min_of(BLOCK_KEYS, part.position[r] + 1 - block);
            int64_t end = r + 1;
            while (end < part.count && min_of(BLOCK_KEYS, part.position[end] + 1 - block) == keys) end++;
            if (keys > 0) {
                const int64_t slices = ceil_div(end - r, VALUE_ROWS);
                for (int64_t i = 0; i < slices; i++) {
                    const int64_t begin = r + i * (end - r) / slices, stop = r + (i + 1) * (end - r) / slices;
                    ValueProduct<T> product{part, rows, begin, keys, v * LANES, first};
                    with_rows(stop - begin, cols, product);
                }
            }
            r = end;
        }
    }
}

// The rows of the block's first `keys` keys; codes are decoded, their scales loaded.
template <class T>
BlockRows<T> find_rows(const LatentAttentionArgs& a, const Tiles& where, int64_t block, int64_t keys, Part<T>& part) {
    BlockRows<T> found;
    for (int64_t t = 0; t * TILE_KEYS < keys; t++) {
        const Tiles::Place place = where(block + t * TILE_KEYS);
        found.rope[t] = at_place<const T>(a.rope_pages, place, part.rope);
        if (!part.tiles) {
            found.latent[t] = at_place<const T>(a.latent_pages, place, part.latent);
            continue;
        }
        T* into = part.decoded + t * TILE_KEYS * part.latent;
        found.latent[t] = into;
        const uint8_t* codes = at_place<const uint8_t>(a.latent_pages, place, part.latent);
        const float* written = a.format == KV_PER_TOKEN ? at_place<const float>(a.scales, place, part.tiles) : nullptr;
        for (int64_t i = 0; i < TILE_KEYS; i++) {  // what stands beside unwritten rows may be anything
            if constexpr (sizeof(T) == 2)
                decode_latent(GroupDecoder::shared(), codes + i * part.latent, part.latent, into + i * part.latent);
            float* scales = part.scales + (t * TILE_KEYS + i) * part.tiles;
            for (int64_t tile = 0; tile < part.tiles; tile++)
                scales[tile] = written ? written[i * part.tiles + tile] : given_scale(a.scales[tile]);
        }
    }
    return found;
}

// All blocks of the query rows of a part.
template <class T> void attend_part(const LatentAttentionArgs& a, const Tiles& where, Part<T>& part) {
    const int64_t last = part.position[part.count - 1];
    for (int64_t block = 0; block <= last; block += BLOCK_KEYS) {
        const bool first = block % a.kv_split == 0;
        const int64_t keys = min_of(BLOCK_KEYS, last + 1 - block);
        int64_t unseen = 0;  // rows before the block
        while (part.position[unseen] < block) unseen++;
        const int64_t first_lane = unseen / LANES * LANES;
        for (int64_t r = first_lane; r < part.lanes; r++)
            part.seen[r] = r < part.count ? float(max_of(0, min_of(BLOCK_KEYS, part.position[r] + 1 - block))) : 0.0f;
        const BlockRows<T> rows = find_rows(a, where, block, keys, part);
        add_scores(part, rows, keys, first_lane);
        if (first && block)
            for (int64_t r = unseen; r < part.count; r++) merge(part, r, block == a.kv_split);
        for (int64_t lane = first_lane; lane < part.lanes; lane += LANES) {
            const bool full = part.seen[lane] == float(keys) && lane + LANES <= part.count;  // positions ascend
            if (full) soften<T, true>(part, lane, keys, a.scale, first);
            else soften<T, false>(part, lane, keys, a.scale, first);
        }
        add_values(part, rows, block, first);
    }
}

template <class T> void put_results(const LatentAttentionArgs& a, const QueryRows& queries, Part<T>& part) {
    const int64_t latent = part.latent;
    for (int64_t r = 0; r < part.count; r++) {
        const int64_t at = queries.token(r) * a.num_heads + queries.head(r), span = part.position[r] / a.kv_split;
        if (span) merge(part, r, false);
        const float *o = (span ? part.merged : part.o) + r * latent, l = span ? part.merged_l[r] : part.l[r];
        T* out = static_cast<T*>(a.out) + at * latent;
        for (int64_t d = 0; d < latent; d += LANES) store(out + d, load(o + d) / set1(l));
        if (a.lse) a.lse[at] = (span ? part.merged_m[r] : part.m[r]) + log_one(l);
    }
}

// How rows are cut into items: whole tokens where several fit into a part, slices of a token's heads where they do not,
// or where there are too few items for the threads.
struct Cut {
    int64_t tokens, slices;
    Cut(const LatentAttentionArgs& a, int64_t threads) {
        int64_t runs = 1;
        for (int64_t row = 1; row < a.rows; row++) runs += a.sequences[row] != a.sequences[row - 1];
        slices = ceil_div(a.num_heads, PART);
        tokens = runs == a.rows ? 1 : max_of(1, PART / a.num_heads);
        while (tokens > 1 && ceil_div(a.rows, tokens) < 4 * threads) tokens = ceil_div(tokens, 2);
        if (a.rows * slices < threads && a.num_heads >= 2 * slices * VALUE_ROWS) slices *= 2;
    }
};

template <class T> void attend(const LatentAttentionArgs& a, Team& team) {
    const int64_t tiles = a.format ? latent_tiles(a.latent_size) : 0;
    Part<T> part;
    char* memory = static_cast<char*>(team.scratch_bytes(Part<T>::bytes(a.latent_size, a.rope_size, tiles)));
    part.carve(memory, a.latent_size, a.rope_size, tiles);
    const Cut cut(a, team.size);
    const int64_t chunks = ceil_div(a.rows, cut.tokens);
    for (int64_t item; (item = team.next(0)) < chunks * cut.slices;) {
        const int64_t chunk = chunks - 1 - item / cut.slices, slice = item % cut.slices;  // long rows first
        const int64_t first_head = slice * a.num_heads / cut.slices;
        const int64_t end_head = (slice + 1) * a.num_heads / cut.slices;
        const int64_t end = min_of(a.rows, (chunk + 1) * cut.tokens);
        for (int64_t begin = chunk * cut.tokens; begin < end;) {
            int64_t stop = begin + 1;
            while (stop < end && a.sequences[stop] == a.sequences[begin]) stop++;
            const QueryRows queries{begin, end_head - first_head, first_head};
            const Tiles where{a.page_table + a.sequences[begin] * a.table_width, a.page_size, 0, 1, a.page_stride};
            take_queries(a, queries, (stop - begin) * queries.heads, part);
            attend_part(a, where, part);
            put_results(a, queries, part);
            begin = stop;
        }
    }
}

}  // namespace

void run_latent_attention(const void* args, Team& team) {
    const LatentAttentionArgs& a = *static_cast<const LatentAttentionArgs*>(args);
    if (a.storage) attend<bf16>(a, team); else attend<float>(a, team);
}

}  // namespace zg
