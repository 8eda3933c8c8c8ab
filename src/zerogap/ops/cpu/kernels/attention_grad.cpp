// Attention backward over the rows of packed samples (formulas and order: ops/attention.py).
//
// One pass: an item is (key tile, KV head) and walks the group's query heads and, for each, the query tiles from its
// own to the sample's last. S and dP are recomputed once, with keys as rows and queries as lanes, and feed dV, dK (sums
// in this thread's memory) and dQ (sums in the shared workspace). dQ's order, key tiles ascending, is kept by a count
// of finished key tiles per (query tile, head): a key tile waits for its predecessor there. Items are claimed in
// ascending order and the lowest unfinished one never waits, so this ends with any number of threads.
#include "attention_codes.h"
#include "attention_grad.h"

namespace zg {
namespace {

// Part of the workspace that belongs to one (tile, query head).
template <class T> struct HeadTile {
    T *q_lanes, *d_out_lanes;  // [D / W][64 rows][W]: rows are lanes, the head dimension is reduced
    T *q_rows, *d_out_rows;    // [64 / W][D][W]: columns are lanes, rows are reduced
    float* dq;                 // [D][64 rows]
    float *lse, *delta;        // [64]
    float* q_scale;            // [64], FP8 operands only
    int32_t* progress;         // key tiles that have been added to dq
    HeadTile(const AttentionGradArgs& a, int64_t tile, int64_t head) {
        const int64_t D = a.head_dim;
        Carver carver{static_cast<char*>(a.workspace) +
                      (tile * a.num_heads + head) * attention_grad_bytes(D, sizeof(T) == 2)};
        q_lanes = carver.take<T>(TILE * D);
        d_out_lanes = carver.take<T>(TILE * D);
        q_rows = carver.take<T>(TILE * D);
        d_out_rows = carver.take<T>(TILE * D);
        dq = carver.take<float>(TILE * D);
        lse = carver.take<float>(TILE);
        delta = carver.take<float>(TILE);
        q_scale = carver.take<float>(TILE);
        progress = carver.take<int32_t>(1);
    }
};

// Quantises 64 rows in place.
void quantise_tile(bf16* rows, int64_t D, bool pow2, float* scales) {
    for (int64_t r = 0; r < TILE; r++, rows += D) {
        scales[r] = row_scale(rows, D, pow2);
        quantise_row(rows, D, scales[r], rows);
    }
}

template <class F> void prepare(const AttentionGradArgs& a, int64_t tile, int64_t head, typename F::Row* rows) {
    typedef typename F::Row T;
    const int64_t D = a.head_dim, stride = a.num_heads * D;
    const Span span = find_tile(a.sample_starts, tile);
    const int64_t first = span.begin * stride + head * D;
    HeadTile<T> work(a, tile, head);
    gather_rows(static_cast<const T*>(a.q) + first, stride, span.rows, D, rows);
    pair_rows(rows, TILE, D, work.q_rows);
    if constexpr (F::MATH) quantise_tile(rows, D, a.pow2, work.q_scale);  // the scores' operand; dk takes q itself
    spread_rows(rows, D, work.q_lanes);
    gather_rows(static_cast<const T*>(a.d_out) + first, stride, span.rows, D, rows);
    pair_rows(rows, TILE, D, work.d_out_rows);
    spread_rows(rows, D, work.d_out_lanes);
    for (int64_t r = 0; r < TILE; r++) {
        work.lse[r] = work.delta[r] = 0;
        if (r >= span.rows) continue;
        const T* out = static_cast<const T*>(a.out) + first + r * stride;
        const T* grad = static_cast<const T*>(a.d_out) + first + r * stride;
        F16 sum = zero();
        for (int64_t d = 0; d < D; d += LANES) sum = fma(load(out + d), load(grad + d), sum);
        work.delta[r] = lane_sum(sum);
        work.lse[r] = a.lse[(span.begin + r) * a.num_heads + head];
    }
    memset(work.dq, 0, TILE * D * sizeof(float));
    *work.progress = 0;
}

// This thread's memory for one item.
template <class T> struct Item {
    T *k, *v, *k_steps;       // [64][D], [64][D], [64 / W][D][W]
    T* k_columns;             // [D][64]
    float* rows;              // [64][D]
    float *s, *dp;            // [64 keys][64 queries]
    T *p, *ds, *ds_steps;     // the same; ds_steps [64 keys / W][64 queries][W]
    T* ds_scaled;             // codes only: ds times the key's scale
    float *key_scale, *value_scale;  // codes only: [64]
    float *dk, *dv;           // [64][D] of each intersection of the KV group with a leaf
    static int64_t bytes(int64_t D, int64_t parts) {
        const int64_t size = sizeof(T);
        return TILE * (D * (4 * size + 4 + parts * 8) + TILE * (4 * size + 8) + 8) + 15 * 64;
    }
    void carve(char* memory, int64_t D, int64_t parts) {
        Carver carver{memory};
        k = carver.take<T>(TILE * D);
        v = carver.take<T>(TILE * D);
        k_steps = carver.take<T>(TILE * D);
        k_columns = carver.take<T>(TILE * D);
        rows = carver.take<float>(TILE * D);
        s = carver.take<float>(TILE * TILE);
        dp = carver.take<float>(TILE * TILE);
        p = carver.take<T>(TILE * TILE);
        ds = carver.take<T>(TILE * TILE);
        ds_steps = carver.take<T>(TILE * TILE);
        ds_scaled = carver.take<T>(TILE * TILE);
        key_scale = carver.take<float>(TILE);
        value_scale = carver.take<float>(TILE);
        dk = carver.take<float>(parts * TILE * D);
        dv = carver.take<float>(parts * TILE * D);
    }
};

// Codes: 64 rows to grid values with their scales, as kv_write made them.
void quantise_keys(const AttentionGradArgs& a, bf16* rows, const float* given, int64_t kv_head, float* scales) {
    if (a.format == KV_PER_TOKEN) return quantise_tile(rows, a.head_dim, a.pow2, scales);
    for (int64_t r = 0; r < TILE; r++) scales[r] = given_scale(given[kv_head]);
    quantise_row(rows, TILE * a.head_dim, scales[0], rows);
}

template <class F>
void load_keys(const AttentionGradArgs& a, const Span& keys, int64_t kv_head, Item<typename F::Row>& item) {
    typedef typename F::Row T;
    const int64_t D = a.head_dim, stride = a.num_kv_heads * D, first = keys.begin * stride + kv_head * D;
    gather_rows(static_cast<const T*>(a.k) + first, stride, keys.rows, D, item.k);
    gather_rows(static_cast<const T*>(a.v) + first, stride, keys.rows, D, item.v);
    if constexpr (F::SCALED) {
        quantise_keys(a, item.k, a.key_scales, kv_head, item.key_scale);
        quantise_keys(a, item.v, a.value_scales, kv_head, item.value_scale);
    }
    pair_rows(item.k, TILE, D, item.k_steps);  // [64 / W][D][W], a word per step and column
    transpose(words(item.k_steps), TILE / Step<T>::WIDTH, D, words(item.k_columns));
}

// p = rn(exp(s * scale - lse)), ds = rn((p32 * (dp - delta)) * scale), +0 where query < key or either is missing.
// Codes: s and dp times the scales of key and value first, and ds_scaled = rn(ds32 * scale of the key).
template <class F>
void soften_tile(const HeadTile<typename F::Row>& work, Item<typename F::Row>& item, int64_t keys, int64_t queries,
                 bool diagonal, float scale) {
    const F16 factor = set1(scale);
    for (int64_t r = 0; r < TILE; r++)
        for (int64_t c = 0; c < TILE; c += LANES) {
            const int64_t at = r * TILE + c, skip = r < keys ? (diagonal ? max_of(0, r - c) : 0) : LANES;
            F16 p = zero(), ds = zero(), ds_scaled = zero();
            if (skip < LANES && c < queries) {
                F16 s = load(item.s + at), dp = load(item.dp + at);
                if (F::SCALED) {
                    const F16 key_scale = set1(item.key_scale[r]);
                    s = s * (F::MATH ? load(work.q_scale + c) * key_scale : key_scale);
                    dp = dp * set1(item.value_scale[r]);
                }
                p = exp(s * factor - load(work.lse + c));
                ds = p * (dp - load(work.delta + c)) * factor;
                p = select(first_n(skip), zero(), select(first_n(queries - c), p, zero()));
                ds = select(first_n(skip), zero(), select(first_n(queries - c), ds, zero()));
                if (F::SCALED) ds_scaled = ds * set1(item.key_scale[r]);
            }
            store(item.p + at, p);
            store(item.ds + at, ds);
            if (F::SCALED) store(item.ds_scaled + at, ds_scaled);
        }
    pair_rows(F::SCALED ? item.ds_scaled : item.ds, TILE, TILE, item.ds_steps);
}

// One (key tile, query tile, head): adds to dk, dv (of the open intersection) and to the query tile's dq.
template <class F>
void add_tile(const AttentionGradArgs& a, Item<typename F::Row>& item, const Span& keys, int64_t tile,
              const Span& queries, int64_t head, float* dk, float* dv, bool first) {
    typedef typename F::Row T;
    constexpr int W = Step<T>::WIDTH;
    const int64_t D = a.head_dim;
    HeadTile<T> work(a, tile, head);
    multiply<T>(keys.rows, item.k, D, D / W, work.q_lanes, TILE, item.s, true);
    multiply<T>(keys.rows, item.v, D, D / W, work.d_out_lanes, TILE, item.dp, true);
    soften_tile<F>(work, item, keys.rows, queries.rows, keys.index == queries.index, a.scale);
    multiply<T>(keys.rows, item.p, TILE, ceil_div(queries.rows, W), work.d_out_rows, D, dv, first);
    multiply<T>(keys.rows, item.ds, TILE, ceil_div(queries.rows, W), work.q_rows, D, dk, first);
    wait_for(work.progress, int32_t(keys.index));
    multiply<T>(D, item.k_columns, TILE, ceil_div(keys.rows, W), item.ds_steps, TILE, work.dq, false);
    if (keys.index == queries.index) {
        T* dq = static_cast<T*>(a.dq) + (queries.begin * a.num_heads + head) * D;
        transpose(words(work.dq), D, TILE, words(item.rows));
        for (int64_t r = 0; r < queries.rows; r++)
            for (int64_t d = 0; d < D; d += LANES) store(dq + r * a.num_heads * D + d, load(item.rows + r * D + d));
    }
    __atomic_store_n(work.progress, int32_t(keys.index + 1), __ATOMIC_RELEASE);
}

// Gradients of 64 rows of k or v. Calibrated codes: +0 where the element was clipped (straight-through elsewhere).
template <class F>
void store_grads(const AttentionGradArgs& a, const Span& keys, int64_t kv_head, const float* sums, const void* source,
                 const float* given, void* grads) {
    typedef typename F::Row T;
    const int64_t D = a.head_dim, row = a.num_kv_heads * D, first = keys.begin * row + kv_head * D;
    const bool clips = F::SCALED && a.format == KV_CALIBRATED;
    const F16 scale = set1(clips ? given_scale(given[kv_head]) : 1.0f);
    for (int64_t r = 0; r < keys.rows; r++)
        for (int64_t d = 0; d < D; d += LANES) {
            F16 sum = load(sums + r * D + d);
            if (clips) {
                const F16 x = abs(load(static_cast<const T*>(source) + first + r * row + d) / scale);
                sum = select(less(set1(E4M3_MAX), x), zero(), sum);
            }
            store(static_cast<T*>(grads) + first + r * row + d, sum);
        }
}

template <class F>
void key_item(const AttentionGradArgs& a, Item<typename F::Row>& item, int64_t tile, int64_t kv_head) {
    const int64_t D = a.head_dim, size = TILE * D;
    const int64_t group = a.num_heads / a.num_kv_heads, per_leaf = a.num_heads / a.leaves;
    const Span keys = find_tile(a.sample_starts, tile);
    load_keys<F>(a, keys, kv_head, item);
    const int64_t first_head = kv_head * group, first_leaf = first_head / per_leaf;
    for (int64_t head = first_head; head < first_head + group; head++) {
        const int64_t part = (head / per_leaf - first_leaf) * size;
        bool first = head == first_head || head % per_leaf == 0;  // a new chain
        for (int64_t index = keys.index; index <= keys.last; index++) {
            const Span queries = find_tile(a.sample_starts, tile + index - keys.index);
            add_tile<F>(a, item, keys, tile + index - keys.index, queries, head, item.dk + part, item.dv + part, first);
            first = false;
        }
    }
    const int64_t end_leaf = (first_head + group - 1) / per_leaf + 1;
    const float* dk = tree_sum(item.dk, size, first_leaf, end_leaf, 0, a.leaves);
    const float* dv = tree_sum(item.dv, size, first_leaf, end_leaf, 0, a.leaves);
    store_grads<F>(a, keys, kv_head, dk, a.k, a.key_scales, a.dk);
    store_grads<F>(a, keys, kv_head, dv, a.v, a.value_scales, a.dv);
}

template <class F> void differentiate(const AttentionGradArgs& a, Team& team) {
    typedef typename F::Row T;
    const int64_t group = a.num_heads / a.num_kv_heads, per_leaf = a.num_heads / a.leaves;
    const int64_t parts = min_of(a.leaves, (group - 1) / per_leaf + 2);
    Item<T> item;
    item.carve(static_cast<char*>(team.scratch_bytes(Item<T>::bytes(a.head_dim, parts))), a.head_dim, parts);
    for (int64_t i; (i = team.next(0)) < a.num_tiles * a.num_heads;)
        prepare<F>(a, i / a.num_heads, i % a.num_heads, item.k);
    team.barrier();
    for (int64_t i; (i = team.next(1)) < a.num_tiles * a.num_kv_heads;)
        key_item<F>(a, item, i / a.num_kv_heads, i % a.num_kv_heads);
}

}  // namespace

void run_attention_grad(const void* args, Team& team) {
    const AttentionGradArgs& a = *static_cast<const AttentionGradArgs*>(args);
    if (a.format && a.fp8_math) differentiate<Coded<true>>(a, team);
    else if (a.format) differentiate<Coded<false>>(a, team);
    else if (a.storage) differentiate<Dense<bf16>>(a, team);
    else differentiate<Dense<float>>(a, team);
}

}  // namespace zg
