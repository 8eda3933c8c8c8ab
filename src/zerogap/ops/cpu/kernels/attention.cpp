// Attention forward over pages: the one definition for training, prefill, chunks and decode.
//
// A query row's bits depend on its position, its own q and the keys up to its position. Query rows of one sequence are
// taken MAX_ROWS at a time so that a loaded key or value serves all of them; where their last blocks differ in length
// the value product runs per length, so that no row ever multiplies a value that it may not see.
#include "attention_codes.h"

namespace zg {
namespace {

// Working memory of up to MAX_ROWS query rows of one sequence and KV head.
template <class T> struct Rows {
    int64_t count, head_dim;
    int64_t position[MAX_ROWS];  // ascending
    T *q, *p, *last;             // [MAX_ROWS][D], [MAX_ROWS][64], one step of values [D][WIDTH]
    float *s;                    // [MAX_ROWS][64]
    float *o, *merged;           // [MAX_ROWS][D] of the open span, of the spans before it
    float m[MAX_ROWS], l[MAX_ROWS], alpha[MAX_ROWS], merged_m[MAX_ROWS], merged_l[MAX_ROWS];
    T* decoded;                      // codes only, shared by tiles of rows: a block of keys or values as dense tiles
    float *key_scale, *value_scale;  // the same: of the keys of the block, [64]
    float q_scale[MAX_ROWS], p_scale[MAX_ROWS];  // FP8 operands only

    void carve(char* memory, int64_t D) {
        Carver carver{memory};
        head_dim = D;
        q = carver.take<T>(MAX_ROWS * D);
        p = carver.take<T>(MAX_ROWS * BLOCK_KEYS);
        last = carver.take<T>(2 * D);
        s = carver.take<float>(MAX_ROWS * BLOCK_KEYS);
        o = carver.take<float>(MAX_ROWS * D);
        merged = carver.take<float>(MAX_ROWS * D);
    }
    void carve_block(char* memory) {
        Carver carver{memory};
        decoded = carver.take<T>(BLOCK_KEYS * head_dim);
        key_scale = carver.take<float>(BLOCK_KEYS);
        value_scale = carver.take<float>(BLOCK_KEYS);
    }
    static int64_t bytes(int64_t D) {  // a multiple of a cache line
        return (MAX_ROWS * (D * 12 + BLOCK_KEYS * 8) + 8 * D + 6 * 64) / 64 * 64;
    }
    static int64_t block_bytes(int64_t D) { return BLOCK_KEYS * (2 * D + 8); }
};

// s[r][16 t + lane] = dot(q[r], key): one chain over steps of the head dimension, ascending, from +0.
template <class F> struct ScoreProduct {
    typedef typename F::Row T;
    typedef typename F::Reader Reader;
    const T* q;
    float* s;
    const BlockTiles<typename Reader::Cell>& tiles;
    int64_t head_dim, begin;
    template <int ROWS, int COLS> void call() {
        F16 acc[ROWS][COLS];
        clear(acc);
        Reader::template keys<ROWS, COLS>(acc, q, head_dim, tiles, begin);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
            for (int c = 0; c < COLS; c++) store(s + r * BLOCK_KEYS + (begin + c) * TILE_KEYS, acc[r][c]);
    }
};

// o[r] = PV (first) or fma(o[r], alpha[r], PV): PV is one chain over the block's first `keys` keys from +0. The partner
// that an odd last key lacks counts as zero. FP8 operands: o[r] = PV * p_scale[r] or fma(PV, p_scale[r], o[r] * alpha[r]).
template <class F> struct ValueProduct {
    typedef typename F::Row T;
    typedef typename F::Reader Reader;
    const T* p;
    const BlockTiles<typename Reader::Cell>& tiles;
    const T* last;  // step of the odd last key
    int64_t keys, head_dim;
    const float *alpha, *p_scale;
    float* o;  // first row, at column 0
    int64_t column;
    bool first;
    template <int ROWS, int COLS> void call() {
        constexpr int W = Step<T>::WIDTH;
        F16 acc[ROWS][COLS];
        clear(acc);
        Reader::template values<ROWS, COLS>(acc, p, keys / W, head_dim, tiles, column);
        if (keys % W) {
            const T* b[COLS];
            for (int c = 0; c < COLS; c++) b[c] = last + (column + c * LANES) * W;
            accumulate<T, ROWS, COLS>(acc, 1, p + keys - 1, BLOCK_KEYS, b, 0);
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
            for (int c = 0; c < COLS; c++) {
                float* out = o + r * head_dim + column + c * LANES;
                if (F::MATH) {
                    const F16 scale = set1(p_scale[r]);
                    store(out, first ? acc[r][c] * scale : fma(acc[r][c], scale, load(out) * set1(alpha[r])));
                } else {
                    store(out, first ? acc[r][c] : fma(load(out), set1(alpha[r]), acc[r][c]));
                }
            }
    }
};

// p as the operand of the value product, of the lanes that are visible. FP8 operands: codes of p times the scales of the
// values by a scale of the row and block, which is returned.
template <class F, bool FULL, int PARTS>
float store_p(typename F::Row* p, F16 (&x)[PARTS], const M16 (&visible)[PARTS], const float* value_scale, bool pow2) {
    F16 top = zero();
    if (F::SCALED)
#pragma GCC unroll 4
        for (int c = 0; c < PARTS; c++) {
            x[c] = x[c] * load(value_scale + c * LANES);
            if (!FULL) x[c] = select(visible[c], x[c], zero());  // unwritten scales may be NaN
            top = max(top, x[c]);
        }
    const float scale = F::MATH ? block_scale(lane_max(top), pow2) : 1.0f;
#pragma GCC unroll 4
    for (int c = 0; c < PARTS; c++) store(p + c * LANES, F::MATH ? round_e4m3(x[c] / set1(scale)) : x[c]);
    return scale;
}

// One row's block: s -> p (rounded to storage), m, l and the factor alpha of what was accumulated before. FULL: all 64
// keys are visible; else lanes from `keys` on hold whatever was left there and are dropped by selection.
template <class F, bool FULL>
void soften(Rows<typename F::Row>& rows, int64_t r, int64_t keys, const AttentionArgs& a, bool first) {
    constexpr int PARTS = BLOCK_KEYS / LANES;
    const float* s = rows.s + r * BLOCK_KEYS;
    const F16 factor = set1(a.scale), lowest = set1(-HUGE_VALF);
    F16 x[PARTS];
    M16 visible[PARTS];
#pragma GCC unroll 4
    for (int c = 0; c < PARTS; c++) {
        visible[c] = first_n(FULL ? LANES : keys - c * LANES);
        x[c] = load(s + c * LANES);
        if (F::MATH) x[c] = x[c] * (set1(rows.q_scale[r]) * load(rows.key_scale + c * LANES));
        else if (F::SCALED) x[c] = x[c] * load(rows.key_scale + c * LANES);
        x[c] = x[c] * factor;
        if (!FULL) x[c] = select(visible[c], x[c], lowest);
    }
    float m = lane_max(max(max(x[0], x[1]), max(x[2], x[3])));
    if (!first && rows.m[r] > m) m = rows.m[r];
    const F16 top = set1(m);
#pragma GCC unroll 4
    for (int c = 0; c < PARTS; c++) x[c] = exp(x[c] - top);
#pragma GCC unroll 4
    for (int c = 0; c < PARTS; c++)
        if (!FULL) x[c] = select(visible[c], x[c], zero());
    const float l = lane_sum(x[0] + x[1] + x[2] + x[3]);
    rows.p_scale[r] = store_p<F, FULL>(rows.p + r * BLOCK_KEYS, x, visible, rows.value_scale, a.pow2);
    rows.alpha[r] = first ? 0.0f : m == rows.m[r] ? 1.0f : exp_one(rows.m[r] - m);
    rows.l[r] = first ? l : fma_one(rows.l[r], rows.alpha[r], l);
    rows.m[r] = m;
}

// Adds the open span of row r to the spans before it.
template <class T> void merge(Rows<T>& rows, int64_t r, bool first) {
    const int64_t D = rows.head_dim;
    float *into = rows.merged + r * D, *from = rows.o + r * D;
    if (first) {
        memcpy(into, from, D * sizeof(float));
        rows.merged_m[r] = rows.m[r];
        rows.merged_l[r] = rows.l[r];
        return;
    }
    const float m = rows.merged_m[r] > rows.m[r] ? rows.merged_m[r] : rows.m[r];
    const float a1 = exp_one(rows.merged_m[r] - m), a2 = exp_one(rows.m[r] - m);
    for (int64_t d = 0; d < D; d += LANES)
        store(into + d, fma(load(into + d), set1(a1), load(from + d) * set1(a2)));
    rows.merged_l[r] = fma_one(rows.merged_l[r], a1, rows.l[r] * a2);
    rows.merged_m[r] = m;
}

// The step of values that begins at key `key` of the tile, with +0 for its second key: what stands there may be unwritten or another
// row's future.
template <class F> void odd_step(Rows<typename F::Row>& rows, const typename F::Reader::Cell* tile, int64_t key) {
    typedef typename F::Row T;
    constexpr int W = Step<T>::WIDTH;
    const int64_t D = rows.head_dim;
    if constexpr (F::SCALED && !F::DECODED) {
        for (int64_t d = 0; d < D; d++)
            rows.last[2 * d] = bf16(bits_of(decode_one(tile[value_code(key, d, D)])) >> 16), rows.last[2 * d + 1] = 0;
    } else {
        const T* step = tile + key / W * D * W;
        for (int64_t d = 0; d < D; d++) { rows.last[d * W] = step[d * W]; rows.last[d * W + W - 1] = 0; }
    }
}

// The value product of one block for every row that sees it, rows with equally many keys together.
template <class F>
void add_values(Rows<typename F::Row>& rows, const BlockTiles<typename F::Reader::Cell>& tiles, int64_t block, bool first) {
    const int64_t D = rows.head_dim, vectors = D / LANES, chunks = ceil_div(vectors, MAX_LANES);
    for (int64_t r = 0; r < rows.count;) {
        const int64_t keys = min_of(BLOCK_KEYS, rows.position[r] + 1 - block);
        int64_t end = r + 1;
        while (end < rows.count && min_of(BLOCK_KEYS, rows.position[end] + 1 - block) == keys) end++;
        if (keys > 0) {
            if (keys % Step<typename F::Row>::WIDTH) odd_step<F>(rows, tiles.tile[keys / TILE_KEYS], (keys - 1) % TILE_KEYS);
            ValueProduct<F> product{rows.p + r * BLOCK_KEYS, tiles, rows.last, keys, D,
                                    rows.alpha + r, rows.p_scale + r, rows.o + r * D, 0, first};
            for (int64_t c = 0; c < chunks; c++) {
                product.column = c * vectors / chunks * LANES;
                with_size(int(end - r), int((c + 1) * vectors / chunks - c * vectors / chunks), product);
            }
        }
        r = end;
    }
}

// Where the tiles of one block stand.
struct BlockPlaces {
    int64_t count;
    Tiles::Place tile[4];
    BlockPlaces(const Tiles& where, int64_t block, int64_t last) {
        count = max_of(0, ceil_div(min_of(BLOCK_KEYS, last + 1 - block), TILE_KEYS));
        for (int64_t t = 0; t < count; t++) tile[t] = where(block + t * TILE_KEYS);
    }
};

// Tiles of keys or of values as products read them: where they stand in the pages, or decoded.
template <class F, bool KEYS>
BlockTiles<typename F::Reader::Cell> find_tiles(const void* pages, const BlockPlaces& block, const BlockPlaces& next,
                                                Rows<typename F::Row>& rows) {
    typedef typename F::Reader::Cell Cell;
    BlockTiles<Cell> found;
    const int64_t D = rows.head_dim;
    for (int64_t t = 0; t < block.count; t++) {
        if constexpr (F::DECODED) {
            const GroupDecoder& decode = GroupDecoder::shared();
            const uint8_t* codes = at_place<const uint8_t>(pages, block.tile[t], D);
            bf16* tile = rows.decoded + t * TILE_KEYS * D;
            if (KEYS) decode_keys(decode, codes, D, tile); else decode_values(decode, codes, D, tile);
            found.tile[t] = tile;
            found.ahead[t] = 0;
        } else {
            const Tiles::Place here = block.tile[t], there = t < next.count ? next.tile[t] : here;
            found.tile[t] = at_place<const Cell>(pages, here, D);
            found.ahead[t] = there.bytes - here.bytes + (there.key - here.key) * D * int64_t(sizeof(Cell));
        }
    }
    return found;
}

// Scales of the keys and values of a block, and the next block's on their way; what stands beside unwritten keys may be
// anything.
template <class T>
void load_scales(const AttentionArgs& a, int64_t head, const BlockPlaces& block, const BlockPlaces& next, Rows<T>& rows) {
    if (a.format == KV_CALIBRATED) {
        for (int64_t i = 0; i < BLOCK_KEYS; i += LANES) {
            store(rows.key_scale + i, set1(given_scale(a.key_scales[head])));
            store(rows.value_scale + i, set1(given_scale(a.value_scales[head])));
        }
        return;
    }
    for (int64_t t = 0; t < next.count; t++) {
        __builtin_prefetch(at_place<const float>(a.key_scales, next.tile[t], 1));
        __builtin_prefetch(at_place<const float>(a.value_scales, next.tile[t], 1));
    }
    for (int64_t t = 0; t < block.count; t++) {
        store(rows.key_scale + t * TILE_KEYS, load(at_place<const float>(a.key_scales, block.tile[t], 1)));
        store(rows.value_scale + t * TILE_KEYS, load(at_place<const float>(a.value_scales, block.tile[t], 1)));
    }
}

// Scores and probabilities of the rows that see the block.
template <class F>
void add_scores(const AttentionArgs& a, const BlockTiles<typename F::Reader::Cell>& keys, int64_t block, bool first,
                Rows<typename F::Row>& rows) {
    const int64_t num_tiles = ceil_div(min_of(BLOCK_KEYS, rows.position[rows.count - 1] + 1 - block), TILE_KEYS);
    for (int64_t t = 0; t < num_tiles; t += MAX_LANES) {
        ScoreProduct<F> product{rows.q, rows.s, keys, rows.head_dim, t};
        with_size(int(rows.count), int(min_of(MAX_LANES, num_tiles - t)), product);
    }
    for (int64_t r = 0; r < rows.count; r++) {
        const int64_t visible = min_of(BLOCK_KEYS, rows.position[r] + 1 - block);
        if (visible <= 0) continue;
        if (first && block) merge(rows, r, block == a.kv_split);
        if (visible == BLOCK_KEYS) soften<F, true>(rows, r, visible, a, first);
        else soften<F, false>(rows, r, visible, a, first);
    }
}

// All blocks of the query rows of `parts`, ascending rows of one sequence; a block that is decoded serves all of them.
template <class F>
void attend_rows(const AttentionArgs& a, const Tiles& where, Rows<typename F::Row>* parts, int64_t num_parts) {
    const int64_t last = parts[num_parts - 1].position[parts[num_parts - 1].count - 1];
    BlockPlaces current(where, 0, last);
    for (int64_t block = 0; block <= last; block += BLOCK_KEYS) {
        const bool first = block % a.kv_split == 0;
        const BlockPlaces next(where, block + BLOCK_KEYS, last);
        const auto keys = find_tiles<F, true>(a.key_pages, current, next, *parts);
        if (F::SCALED) load_scales(a, where.head, current, next, *parts);
        for (int64_t i = 0; i < num_parts; i++) add_scores<F>(a, keys, block, first, parts[i]);
        const auto values = find_tiles<F, false>(a.value_pages, current, next, *parts);
        for (int64_t i = 0; i < num_parts; i++) add_values<F>(parts[i], values, block, first);
        current = next;
    }
}

// A query row as an operand of the scores.
template <class F> void take_query(Rows<typename F::Row>& rows, int64_t r, const typename F::Row* q, bool pow2) {
    typename F::Row* into = rows.q + r * rows.head_dim;
    if constexpr (F::MATH) {
        rows.q_scale[r] = row_scale(q, rows.head_dim, pow2);
        quantise_row(q, rows.head_dim, rows.q_scale[r], into);
    } else {
        memcpy(into, q, rows.head_dim * sizeof(*q));
    }
}

// Query rows of one sequence and KV head: row i is query head i % group of the head's group, of token begin + i / group.
struct QueryRows {
    int64_t begin, group, kv_head;
    int64_t token(int64_t i) const { return begin + i / group; }
    int64_t head(int64_t i) const { return kv_head * group + i % group; }
};

template <class F>
void take_queries(const AttentionArgs& a, const QueryRows& queries, int64_t from, int64_t end, Rows<typename F::Row>& rows) {
    rows.count = end - from;
    for (int64_t r = 0; r < rows.count; r++) {
        const int64_t token = queries.token(from + r), at = token * a.num_heads + queries.head(from + r);
        rows.position[r] = a.positions[token];
        take_query<F>(rows, r, static_cast<const typename F::Row*>(a.q) + at * a.head_dim, a.pow2);
    }
}

template <class T> void put_results(const AttentionArgs& a, const QueryRows& queries, int64_t from, Rows<T>& rows) {
    const int64_t D = a.head_dim;
    for (int64_t r = 0; r < rows.count; r++) {
        const int64_t at = queries.token(from + r) * a.num_heads + queries.head(from + r);
        const int64_t span = rows.position[r] / a.kv_split;
        if (span) merge(rows, r, false);
        const float *o = (span ? rows.merged : rows.o) + r * D, l = span ? rows.merged_l[r] : rows.l[r];
        T* out = static_cast<T*>(a.out) + at * D;
        for (int64_t d = 0; d < D; d += LANES) store(out + d, load(o + d) / set1(l));
        if (a.lse) a.lse[at] = (span ? rows.merged_m[r] : rows.m[r]) + log_one(l);
    }
}

// Rows `begin` to `end` of one sequence, all query heads of one KV head. `parts`: PARTS of them.
template <class F>
void attend_sequence(const AttentionArgs& a, int64_t kv_head, int64_t begin, int64_t end, Rows<typename F::Row>* parts) {
    const QueryRows queries{begin, a.num_heads / a.num_kv_heads, kv_head};
    const int64_t total = (end - begin) * queries.group, num_parts = ceil_div(total, MAX_ROWS);
    const Tiles where{a.page_table + a.sequences[begin] * a.table_width, a.page_size, kv_head, a.num_kv_heads,
                      a.page_stride};
    for (int64_t part = 0; part < num_parts; part += F::PARTS) {
        const int64_t count = min_of(F::PARTS, num_parts - part);
        for (int64_t i = 0; i < count; i++)
            take_queries<F>(a, queries, (part + i) * total / num_parts, (part + i + 1) * total / num_parts, parts[i]);
        if constexpr (F::DECODED) {
            if (total <= IN_REGISTERS_ROWS) attend_rows<Streamed<F::MATH>>(a, where, parts, count);
            else attend_rows<F>(a, where, parts, count);
        } else {
            attend_rows<F>(a, where, parts, count);
        }
        for (int64_t i = 0; i < count; i++) put_results(a, queries, (part + i) * total / num_parts, parts[i]);
    }
}

// Tokens per item: whole tiles of MAX_ROWS query rows where the group allows, about `tiles` of them if that leaves each
// thread some items. One where every row is of another sequence: nothing is shared then, and small items balance better.
int64_t tokens_per_item(const AttentionArgs& a, int64_t tiles, int64_t threads) {
    const int64_t group = a.num_heads / a.num_kv_heads;
    int64_t runs = 1;
    for (int64_t row = 1; row < a.rows; row++) runs += a.sequences[row] != a.sequences[row - 1];
    if (runs == a.rows) return 1;
    while (tiles > 2 && a.rows * a.num_heads < 4 * threads * tiles * MAX_ROWS) tiles /= 2;
    int64_t tokens = ceil_div(tiles * MAX_ROWS, group);
    while (tokens * group % MAX_ROWS && tokens * group < 2 * tiles * MAX_ROWS) tokens++;
    return tokens;
}

template <class F> void attend(const AttentionArgs& a, Team& team) {
    Rows<typename F::Row> parts[F::PARTS];
    const int64_t bytes = parts->bytes(a.head_dim), block_bytes = F::SCALED ? parts->block_bytes(a.head_dim) : 0;
    char* memory = static_cast<char*>(team.scratch_bytes(F::PARTS * bytes + block_bytes));
    for (int64_t i = 0; i < F::PARTS; i++) {
        parts[i].carve(memory + i * bytes, a.head_dim);
        if (F::SCALED) parts[i].carve_block(memory + F::PARTS * bytes);
    }
    const int64_t tokens = tokens_per_item(a, max_of(2, F::PARTS), team.size), chunks = ceil_div(a.rows, tokens);
    for (int64_t item; (item = team.next(0)) < chunks * a.num_kv_heads;) {
        const int64_t kv_head = item / chunks, chunk = chunks - 1 - item % chunks;  // long rows first
        const int64_t end = min_of(a.rows, (chunk + 1) * tokens);
        for (int64_t begin = chunk * tokens; begin < end;) {
            int64_t stop = begin + 1;
            while (stop < end && a.sequences[stop] == a.sequences[begin]) stop++;
            attend_sequence<F>(a, kv_head, begin, stop, parts);
            begin = stop;
        }
    }
}

}  // namespace

void run_attention(const void* args, Team& team) {
    const AttentionArgs& a = *static_cast<const AttentionArgs*>(args);
    if (a.format && a.fp8_math) attend<Coded<true>>(a, team);
    else if (a.format) attend<Coded<false>>(a, team);
    else if (a.storage) attend<Dense<bf16>>(a, team);
    else attend<Dense<float>>(a, team);
}

}  // namespace zg
