// Attention backward over the rows of packed samples (formulas and order: ops/attention.py).
//
// One pass: an item is (key tile, KV head) and walks the group's query heads and, for each, the query tiles from its own
// to the sample's last. S and dP are recomputed once, with keys as rows and queries as lanes, and feed dV, dK (sums in
// this thread's memory) and dQ (sums in the shared workspace). dQ's order, key tiles ascending, is kept by a progress
// count per (query tile, head): a key tile waits for its predecessor there. Items are claimed in ascending order and the
// lowest unfinished one never waits, so this ends with any number of threads.
#include "attention.h"
#include <sched.h>

namespace zg {
namespace {

constexpr int64_t TILE = BLOCK_KEYS;

// Part of the workspace that belongs to one (tile, query head).
template <class T> struct HeadTile {
    T *q_lanes, *d_out_lanes;  // [D / W][64 rows][W]: rows are lanes, the head dimension is reduced
    T *q_rows, *d_out_rows;    // [64 / W][D][W]: columns are lanes, rows are reduced
    float* dq;                 // [D][64 rows]
    float *lse, *delta;        // [64]
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
        progress = carver.take<int32_t>(1);
    }
};

struct Span { int64_t begin, rows, index, last; };  // first row, rows, tile index in the sample, index of its last tile

// The tile-th tile of 64 rows, samples in order.
Span find_tile(const AttentionGradArgs& a, int64_t tile) {
    for (int64_t s = 0;; s++) {
        const int64_t begin = a.sample_starts[s], length = a.sample_starts[s + 1] - begin, tiles = ceil_div(length, TILE);
        if (tile < tiles) return {begin + tile * TILE, min_of(TILE, length - tile * TILE), tile, tiles - 1};
        tile -= tiles;
    }
}

// Source rows [rows][D] at `stride` -> both packings; missing rows are zero.
template <class T> void pack_tile(const T* source, int64_t stride, int64_t rows, int64_t D, T* lanes, T* by_rows) {
    constexpr int W = Step<T>::WIDTH;
    if (rows < TILE) {
        memset(lanes, 0, TILE * D * sizeof(T));
        memset(by_rows, 0, TILE * D * sizeof(T));
    }
    for (int64_t r = 0; r < rows; r++) {
        const T* row = source + r * stride;
        for (int64_t d = 0; d < D; d += W) memcpy(lanes + d * TILE + r * W, row + d, sizeof(T) * W);
        T* into = by_rows + r / W * D * W + r % W;
        for (int64_t d = 0; d < D; d++) into[d * W] = row[d];
    }
}

template <class T> void prepare(const AttentionGradArgs& a, int64_t tile, int64_t head) {
    const int64_t D = a.head_dim, stride = a.num_heads * D;
    const Span span = find_tile(a, tile);
    const int64_t first = span.begin * stride + head * D;
    HeadTile<T> work(a, tile, head);
    pack_tile(static_cast<const T*>(a.q) + first, stride, span.rows, D, work.q_lanes, work.q_rows);
    pack_tile(static_cast<const T*>(a.d_out) + first, stride, span.rows, D, work.d_out_lanes, work.d_out_rows);
    for (int64_t r = 0; r < TILE; r++) {
        work.lse[r] = work.delta[r] = 0;
        if (r >= span.rows) continue;
        const T *out = static_cast<const T*>(a.out) + first + r * stride, *grad = static_cast<const T*>(a.d_out) + first + r * stride;
        F16 sum = zero();
        for (int64_t d = 0; d < D; d += LANES) sum = fma(load(out + d), load(grad + d), sum);
        work.delta[r] = lane_sum(sum);
        work.lse[r] = a.lse[(span.begin + r) * a.num_heads + head];
    }
    memset(work.dq, 0, TILE * D * sizeof(float));
    *work.progress = 0;
}

// c[r][column] (row stride c_stride) = or += the chain over `steps` of a[r] and b, b being [steps][b_width][W].
template <class T> struct Product {
    const T* a;
    int64_t a_stride, steps;
    const T* b;
    int64_t b_width;
    float* c;
    int64_t c_stride;
    bool from_zero;
    template <int ROWS, int COLS> void call() {
        constexpr int W = Step<T>::WIDTH;
        F16 acc[ROWS][COLS];
        const T* columns[COLS];
        for (int i = 0; i < COLS; i++) {
            columns[i] = b + i * LANES * W;
            for (int r = 0; r < ROWS; r++) acc[r][i] = from_zero ? zero() : load(c + r * c_stride + i * LANES);
        }
        accumulate<T, ROWS, COLS>(acc, steps, a, a_stride, columns, b_width * W);
        for (int r = 0; r < ROWS; r++)
            for (int i = 0; i < COLS; i++) store(c + r * c_stride + i * LANES, acc[r][i]);
    }
};

template <class T>
void multiply(int64_t rows, const T* a, int64_t a_stride, int64_t steps, const T* b, int64_t width, float* c, bool from_zero) {
    constexpr int W = Step<T>::WIDTH;
    const int64_t vectors = width / LANES, col_parts = ceil_div(vectors, MAX_LANES), row_parts = ceil_div(rows, MAX_ROWS);
    for (int64_t j = 0; j < col_parts; j++) {
        const int64_t column = j * vectors / col_parts, columns = (j + 1) * vectors / col_parts - column;
        for (int64_t i = 0; i < row_parts; i++) {
            const int64_t row = i * rows / row_parts, count = (i + 1) * rows / row_parts - row;
            Product<T> product{a + row * a_stride, a_stride, steps, b + column * LANES * W, width,
                               c + row * width + column * LANES, width, from_zero};
            with_size(int(count), int(columns), product);
        }
    }
}

// This thread's memory for one item.
template <class T> struct Item {
    T *k, *v, *k_columns;     // [64][D], [64][D], [D][64]
    float *s, *dp;            // [64 keys][64 queries]
    T *p, *ds, *ds_steps;     // the same; ds_steps [64 keys / W][64 queries][W]
    float *dk, *dv;           // [64][D] of each intersection of the KV group with a leaf
    static int64_t bytes(int64_t D, int64_t parts) {
        return 3 * TILE * D * int64_t(sizeof(T)) + TILE * TILE * (8 + 3 * int64_t(sizeof(T))) + parts * 2 * TILE * D * 4 + 10 * 64;
    }
    void carve(char* memory, int64_t D, int64_t parts) {
        Carver carver{memory};
        k = carver.take<T>(TILE * D);
        v = carver.take<T>(TILE * D);
        k_columns = carver.take<T>(TILE * D);
        s = carver.take<float>(TILE * TILE);
        dp = carver.take<float>(TILE * TILE);
        p = carver.take<T>(TILE * TILE);
        ds = carver.take<T>(TILE * TILE);
        ds_steps = sizeof(T) == 2 ? carver.take<T>(TILE * TILE) : ds;
        dk = carver.take<float>(parts * TILE * D);
        dv = carver.take<float>(parts * TILE * D);
    }
};

template <class T> void load_keys(const AttentionGradArgs& a, const Span& keys, int64_t kv_head, Item<T>& item) {
    const int64_t D = a.head_dim, stride = a.num_kv_heads * D, first = keys.begin * stride + kv_head * D;
    memset(item.k_columns, 0, TILE * D * sizeof(T));
    memset(item.k + keys.rows * D, 0, (TILE - keys.rows) * D * sizeof(T));
    memset(item.v + keys.rows * D, 0, (TILE - keys.rows) * D * sizeof(T));
    for (int64_t r = 0; r < keys.rows; r++) {
        memcpy(item.k + r * D, static_cast<const T*>(a.k) + first + r * stride, D * sizeof(T));
        memcpy(item.v + r * D, static_cast<const T*>(a.v) + first + r * stride, D * sizeof(T));
        for (int64_t d = 0; d < D; d++) item.k_columns[d * TILE + r] = item.k[r * D + d];
    }
}

// p = rn(exp(s * scale - lse)), ds = rn((p32 * (dp - delta)) * scale), +0 where query < key or either is missing.
template <class T> void soften_tile(const HeadTile<T>& work, Item<T>& item, int64_t keys, int64_t queries, bool diagonal, float scale) {
    constexpr int W = Step<T>::WIDTH;
    const F16 factor = set1(scale);
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
        }
    if (W == 1) return;  // ds_steps is ds
    for (int64_t r = 0; r < TILE; r += 2)
        for (int64_t c = 0; c < TILE; c++) {
            item.ds_steps[(r * TILE) + 2 * c] = item.ds[r * TILE + c];
            item.ds_steps[(r * TILE) + 2 * c + 1] = item.ds[(r + 1) * TILE + c];
        }
}

void wait_for(const int32_t* progress, int32_t value) {
    for (int spins = 0; __atomic_load_n(progress, __ATOMIC_ACQUIRE) != value; spins++)
        if (spins > 200) sched_yield();
}

// One (key tile, query tile, head): adds to dk, dv (of the open intersection) and to the query tile's dq.
template <class T>
void add_tile(const AttentionGradArgs& a, Item<T>& item, const Span& keys, int64_t tile, const Span& queries, int64_t head,
              float* dk, float* dv, bool first) {
    constexpr int W = Step<T>::WIDTH;
    const int64_t D = a.head_dim;
    HeadTile<T> work(a, tile, head);
    multiply<T>(keys.rows, item.k, D, D / W, work.q_lanes, TILE, item.s, true);
    multiply<T>(keys.rows, item.v, D, D / W, work.d_out_lanes, TILE, item.dp, true);
    soften_tile(work, item, keys.rows, queries.rows, keys.index == queries.index, a.scale);
    multiply<T>(keys.rows, item.p, TILE, ceil_div(queries.rows, W), work.d_out_rows, D, dv, first);
    multiply<T>(keys.rows, item.ds, TILE, ceil_div(queries.rows, W), work.q_rows, D, dk, first);
    wait_for(work.progress, int32_t(keys.index));
    multiply<T>(D, item.k_columns, TILE, ceil_div(keys.rows, W), item.ds_steps, TILE, work.dq, false);
    if (keys.index == queries.index) {
        T* dq = static_cast<T*>(a.dq) + (queries.begin * a.num_heads + head) * D;
        for (int64_t r = 0; r < queries.rows; r++)
            for (int64_t d = 0; d < D; d++) store_one(dq + r * a.num_heads * D + d, work.dq[d * TILE + r]);
    }
    __atomic_store_n(work.progress, int32_t(keys.index + 1), __ATOMIC_RELEASE);
}

// Sums parts[leaf - first] over the leaves [low, high) that exist, by the fixed tree; the result is the first part.
float* tree_sum(float* parts, int64_t size, int64_t first, int64_t end, int64_t low, int64_t high) {
    if (high <= first || low >= end) return nullptr;
    if (high - low == 1) return parts + (low - first) * size;
    const int64_t middle = (low + high) / 2;
    float *left = tree_sum(parts, size, first, end, low, middle), *right = tree_sum(parts, size, first, end, middle, high);
    if (!left || !right) return left ? left : right;
    for (int64_t i = 0; i < size; i += LANES) store(left + i, load(left + i) + load(right + i));
    return left;
}

template <class T> void key_item(const AttentionGradArgs& a, Item<T>& item, int64_t tile, int64_t kv_head) {
    const int64_t D = a.head_dim, group = a.num_heads / a.num_kv_heads, per_leaf = a.num_heads / a.leaves, size = TILE * D;
    const Span keys = find_tile(a, tile);
    load_keys(a, keys, kv_head, item);
    const int64_t first_head = kv_head * group, first_leaf = first_head / per_leaf;
    for (int64_t head = first_head; head < first_head + group; head++) {
        const int64_t part = head / per_leaf - first_leaf;
        bool first = head == first_head || head % per_leaf == 0;  // a new chain
        for (int64_t index = keys.index; index <= keys.last; index++) {
            const Span queries = find_tile(a, tile + index - keys.index);
            add_tile(a, item, keys, tile + index - keys.index, queries, head, item.dk + part * size, item.dv + part * size, first);
            first = false;
        }
    }
    const int64_t end_leaf = (first_head + group - 1) / per_leaf + 1, row = a.num_kv_heads * D;
    const float* dk = tree_sum(item.dk, size, first_leaf, end_leaf, 0, a.leaves);
    const float* dv = tree_sum(item.dv, size, first_leaf, end_leaf, 0, a.leaves);
    T *dk_rows = static_cast<T*>(a.dk) + keys.begin * row + kv_head * D, *dv_rows = static_cast<T*>(a.dv) + keys.begin * row + kv_head * D;
    for (int64_t r = 0; r < keys.rows; r++)
        for (int64_t d = 0; d < D; d += LANES) {
            store(dk_rows + r * row + d, load(dk + r * D + d));
            store(dv_rows + r * row + d, load(dv + r * D + d));
        }
}

template <class T> void differentiate(const AttentionGradArgs& a, Team& team) {
    for (int64_t i; (i = team.next(0)) < a.num_tiles * a.num_heads;) prepare<T>(a, i / a.num_heads, i % a.num_heads);
    team.barrier();
    const int64_t group = a.num_heads / a.num_kv_heads, per_leaf = a.num_heads / a.leaves;
    const int64_t parts = min_of(a.leaves, (group - 1) / per_leaf + 2);
    Item<T> item;
    item.carve(static_cast<char*>(team.scratch_bytes(Item<T>::bytes(a.head_dim, parts))), a.head_dim, parts);
    for (int64_t i; (i = team.next(1)) < a.num_tiles * a.num_kv_heads;) key_item(a, item, i / a.num_kv_heads, i % a.num_kv_heads);
}

}  // namespace

void run_attention_grad(const void* args, Team& team) {
    const AttentionGradArgs& a = *static_cast<const AttentionGradArgs*>(args);
    if (a.storage) differentiate<bf16>(a, team); else differentiate<float>(a, team);
}

}  // namespace zg
