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
    T* decoded;                                // codes only: a block of keys or values as dense tiles
    float *key_scale, *value_scale;            // codes only: of the keys of the block, [64]
    float q_scale[MAX_ROWS], p_scale[MAX_ROWS];  // FP8 operands only

    void carve(char* memory, int64_t D, bool coded) {
        Carver carver{memory};
        head_dim = D;
        q = carver.take<T>(MAX_ROWS * D);
        p = carver.take<T>(MAX_ROWS * BLOCK_KEYS);
        last = carver.take<T>(2 * D);
        s = carver.take<float>(MAX_ROWS * BLOCK_KEYS);
        o = carver.take<float>(MAX_ROWS * D);
        merged = carver.take<float>(MAX_ROWS * D);
        decoded = carver.take<T>(coded ? BLOCK_KEYS * D : 0);
        key_scale = carver.take<float>(BLOCK_KEYS);
        value_scale = carver.take<float>(BLOCK_KEYS);
    }
    static int64_t bytes(int64_t D, bool coded) {
        return MAX_ROWS * (D * 12 + BLOCK_KEYS * 8) + 8 * D + 6 * 64 + BLOCK_KEYS * (8 + (coded ? 2 * D : 0));
    }
};

// s[r][16 t + lane] = dot(q[r], key): one chain over steps of the head dimension, ascending, from +0.
template <class T> struct ScoreProduct {
    const T* q;
    float* s;
    const T* const* tiles;
    int64_t head_dim;
    template <int ROWS, int COLS> void call() {
        constexpr int W = Step<T>::WIDTH;
        F16 acc[ROWS][COLS];
        const T* b[COLS];
        for (int c = 0; c < COLS; c++) {
            b[c] = tiles[c];
            for (int r = 0; r < ROWS; r++) acc[r][c] = zero();
        }
        accumulate<T, ROWS, COLS>(acc, head_dim / W, q, head_dim, b, TILE_KEYS * W);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
            for (int c = 0; c < COLS; c++) store(s + r * BLOCK_KEYS + c * TILE_KEYS, acc[r][c]);
    }
};

// o[r] = PV (first) or fma(o[r], alpha[r], PV): PV is one chain over the block's first `keys` keys from +0. The partner
// that an odd last key lacks counts as zero. FP8 operands: o[r] = PV * p_scale[r] or fma(PV, p_scale[r], o[r] * alpha[r]).
template <class F> struct ValueProduct {
    typedef typename F::Row T;
    const T* p;
    const T* const* tiles;
    const T* last;  // step of the odd last key
    int64_t keys, head_dim;
    const float *alpha, *p_scale;
    float* o;  // first row, at column 0
    int64_t column;
    bool first;
    template <int ROWS, int COLS> void call() {
        constexpr int W = Step<T>::WIDTH;
        F16 acc[ROWS][COLS];
        const T* b[COLS];
        for (int c = 0; c < COLS; c++)
            for (int r = 0; r < ROWS; r++) acc[r][c] = zero();
        for (int64_t key = 0; key < keys / W * W; key += TILE_KEYS) {
            for (int c = 0; c < COLS; c++) b[c] = tiles[key / TILE_KEYS] + (column + c * LANES) * W;
            accumulate<T, ROWS, COLS>(acc, min_of(keys - key, TILE_KEYS) / W, p + key, BLOCK_KEYS, b, head_dim * W);
        }
        if (keys % W) {
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

// The value product of one block for every row that sees it, rows with equally many keys together.
template <class F>
void add_values(Rows<typename F::Row>& rows, const typename F::Row* const* tiles, int64_t block, bool first) {
    typedef typename F::Row T;
    constexpr int W = Step<T>::WIDTH;
    const int64_t D = rows.head_dim, vectors = D / LANES, chunks = ceil_div(vectors, MAX_LANES);
    for (int64_t r = 0; r < rows.count;) {
        const int64_t keys = min_of(BLOCK_KEYS, rows.position[r] + 1 - block);
        int64_t end = r + 1;
        while (end < rows.count && min_of(BLOCK_KEYS, rows.position[end] + 1 - block) == keys) end++;
        if (keys > 0) {
            if (keys % W) {  // its partner in the pair may be unwritten or another row's future
                const T* step = tiles[keys / TILE_KEYS] + keys % TILE_KEYS / W * D * W;
                for (int64_t d = 0; d < D; d++) { rows.last[d * W] = step[d * W]; rows.last[d * W + W - 1] = 0; }
            }
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

// Tiles of the block that starts at key `block`, of keys or of values, as the products read them: where they stand in
// the pages, or decoded.
template <class F, bool KEYS>
void find_tiles(const AttentionArgs& a, const Tiles& where, int64_t block, int64_t num_tiles,
                Rows<typename F::Row>& rows, const typename F::Row** tiles) {
    typedef typename F::Row T;
    const int64_t D = a.head_dim;
    const void* pages = KEYS ? a.key_pages : a.value_pages;
    for (int64_t t = 0; t < num_tiles; t++) {
        const int64_t offset = where.offset(block + t * TILE_KEYS);
        if constexpr (F::SCALED) {
            const GroupDecoder& decode = GroupDecoder::shared();
            const uint8_t* codes = static_cast<const uint8_t*>(pages) + offset;
            T* tile = rows.decoded + t * TILE_KEYS * D;
            if (KEYS) decode_keys(decode, codes, D, tile); else decode_values(decode, codes, D, tile);
            tiles[t] = tile;
        } else {
            tiles[t] = static_cast<const T*>(pages) + offset;
        }
    }
}

// Scales of the keys and values of a block; what stands beside unwritten keys may be anything.
template <class T>
void load_scales(const AttentionArgs& a, const Tiles& where, int64_t block, int64_t num_tiles, Rows<T>& rows) {
    for (int64_t t = 0; t < num_tiles; t++) {
        const int64_t row = where.row(block + t * TILE_KEYS), at = t * TILE_KEYS;
        const bool given = a.format == KV_CALIBRATED;
        store(rows.key_scale + at, given ? set1(given_scale(a.key_scales[where.head])) : load(a.key_scales + row));
        store(rows.value_scale + at, given ? set1(given_scale(a.value_scales[where.head])) : load(a.value_scales + row));
    }
}

// All blocks of up to MAX_ROWS query rows.
template <class F> void attend_rows(const AttentionArgs& a, const Tiles& where, Rows<typename F::Row>& rows) {
    typedef typename F::Row T;
    const int64_t last = rows.position[rows.count - 1];
    for (int64_t block = 0; block <= last; block += BLOCK_KEYS) {
        const bool first = block % a.kv_split == 0;
        const T *key_tiles[4], *value_tiles[4];
        const int64_t num_tiles = ceil_div(min_of(BLOCK_KEYS, last + 1 - block), TILE_KEYS);
        find_tiles<F, true>(a, where, block, num_tiles, rows, key_tiles);
        if (F::SCALED) load_scales(a, where, block, num_tiles, rows);
        for (int64_t t = 0; t < num_tiles; t += MAX_LANES) {
            ScoreProduct<T> product{rows.q, rows.s + t * TILE_KEYS, key_tiles + t, rows.head_dim};
            with_size(int(rows.count), int(min_of(MAX_LANES, num_tiles - t)), product);
        }
        for (int64_t r = 0; r < rows.count; r++) {
            const int64_t visible = min_of(BLOCK_KEYS, rows.position[r] + 1 - block);
            if (visible <= 0) continue;
            if (first && block) merge(rows, r, block == a.kv_split);
            if (visible == BLOCK_KEYS) soften<F, true>(rows, r, visible, a, first);
            else soften<F, false>(rows, r, visible, a, first);
        }
        find_tiles<F, false>(a, where, block, num_tiles, rows, value_tiles);
        add_values<F>(rows, value_tiles, block, first);
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

// Rows `begin` to `end` of one sequence, all query heads of one KV head.
template <class F>
void attend_sequence(const AttentionArgs& a, int64_t kv_head, int64_t begin, int64_t end, Rows<typename F::Row>& rows) {
    typedef typename F::Row T;
    const int64_t D = a.head_dim, group = a.num_heads / a.num_kv_heads, total = (end - begin) * group;
    const int64_t parts = ceil_div(total, MAX_ROWS);
    const Tiles where{a.page_table + a.sequences[begin] * a.table_width, a.page_size, kv_head, a.num_kv_heads, D};
    for (int64_t part = 0; part < parts; part++) {
        const int64_t from = part * total / parts;
        rows.count = (part + 1) * total / parts - from;
        for (int64_t r = 0; r < rows.count; r++) {
            const int64_t row = begin + (from + r) / group, head = kv_head * group + (from + r) % group;
            rows.position[r] = a.positions[row];
            take_query<F>(rows, r, static_cast<const T*>(a.q) + (row * a.num_heads + head) * D, a.pow2);
        }
        attend_rows<F>(a, where, rows);
        for (int64_t r = 0; r < rows.count; r++) {
            const int64_t row = begin + (from + r) / group, head = kv_head * group + (from + r) % group;
            const int64_t span = rows.position[r] / a.kv_split, at = row * a.num_heads + head;
            if (span) merge(rows, r, false);
            const float *o = (span ? rows.merged : rows.o) + r * D, l = span ? rows.merged_l[r] : rows.l[r];
            T* out = static_cast<T*>(a.out) + at * D;
            for (int64_t d = 0; d < D; d += LANES) store(out + d, load(o + d) / set1(l));
            if (a.lse) a.lse[at] = (span ? rows.merged_m[r] : rows.m[r]) + log_one(l);
        }
    }
}

// Tokens per item: whole tiles of MAX_ROWS query rows where the group allows, at most about three of them.
int64_t tokens_per_item(int64_t group) {
    int64_t tokens = ceil_div(2 * MAX_ROWS, group);
    while (tokens * group % MAX_ROWS && tokens * group < 4 * MAX_ROWS) tokens++;
    return tokens;
}

template <class F> void attend(const AttentionArgs& a, Team& team) {
    Rows<typename F::Row> rows;
    const int64_t bytes = rows.bytes(a.head_dim, F::SCALED);
    rows.carve(static_cast<char*>(team.scratch_bytes(bytes)), a.head_dim, F::SCALED);
    const int64_t tokens = tokens_per_item(a.num_heads / a.num_kv_heads), chunks = ceil_div(a.rows, tokens);
    for (int64_t item; (item = team.next(0)) < chunks * a.num_kv_heads;) {
        const int64_t kv_head = item / chunks, chunk = chunks - 1 - item % chunks;  // long rows first
        const int64_t end = min_of(a.rows, (chunk + 1) * tokens);
        for (int64_t begin = chunk * tokens; begin < end;) {
            int64_t stop = begin + 1;
            while (stop < end && a.sequences[stop] == a.sequences[begin]) stop++;
            attend_sequence<F>(a, kv_head, begin, stop, rows);
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
