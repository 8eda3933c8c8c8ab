// Attention over paged keys and values, forward and backward (docs/numerics.md, "attention"; ops/attention.py says the
// formulas). This header holds the argument structs and the small product both directions are made of.
#pragma once
#include "team.h"

namespace zg {

// Pages. The unit is a tile of TILE_KEYS = 16 keys of one KV head, so that a page size (a multiple of 16) only says
// where tiles stand, never what is computed. For head_dim D a tile is D * 16 elements:
//   keys:   BF16 [D / 2][16 keys][2 dims]    FP32 [D][16 keys]
//   values: BF16 [8 key pairs][D][2 keys]    FP32 [16 keys][D]
// FP8 pages hold a code per element in the same tiles, but two steps of BF16 side by side, so that 64 codes decode into
// two steps at once (attention_codes.h).
// A page holds [num_kv_heads][page_size / 16] tiles; page_stride bytes lie between what two KV heads of a page, or the
// last and the first of two pages, have: keys, values and scales of a KV head may stand side by side. What no key was
// written to may hold anything, NaN included.
constexpr int TILE_KEYS = 16;
constexpr int BLOCK_KEYS = 64;  // keys per softmax block, aligned to absolute position 0; rows of a gradient tile

// How keys and values stand in pages, and the FP8 arithmetic that follows from it.
enum KVFormat : int32_t {
    KV_DENSE = 0,       // the storage dtype
    KV_PER_TOKEN = 1,   // E4M3 codes; scales FP32 [page_size] per page and KV head, written with the codes
    KV_CALIBRATED = 2,  // E4M3 codes; scales FP32 [num_kv_heads], given
};

// Stores k and v of each row at its absolute position.
struct KVWriteArgs {
    int64_t rows;
    const void *k, *v;  // [rows, num_kv_heads * head_dim] storage dtype
    const int32_t *positions, *sequences;  // [rows]
    const int32_t* page_table;             // [any, table_width]
    int64_t table_width;
    void *key_pages, *value_pages;
    float *key_scales, *value_scales;  // as `format` says: written, only read, or null
    int64_t page_stride;
    int32_t num_kv_heads, head_dim, page_size, storage;
    int32_t format, pow2;              // KVFormat; scales are rounded up to powers of two
};
void run_kv_write(const void* args, Team& team);

// amax[h] = max(amax[h], |k|) over the rows of KV head h; NaN counts as the largest.
struct KVAmaxArgs {
    int64_t rows;
    const void* k;  // [rows, num_kv_heads * head_dim] storage dtype
    float* amax;    // [num_kv_heads]
    int32_t num_kv_heads, head_dim, storage;
};
void run_kv_amax(const void* args, Team& team);

struct AttentionArgs {
    int64_t rows;
    const void* q;  // [rows, num_heads * head_dim] storage dtype
    const int32_t *positions, *sequences;
    const int32_t* page_table;
    int64_t table_width;
    const void *key_pages, *value_pages;
    const float *key_scales, *value_scales;
    int64_t page_stride;
    void* out;   // [rows, num_heads * head_dim] storage dtype
    float* lse;  // [rows, num_heads] m + log(l), or null
    int32_t num_heads, num_kv_heads, head_dim, page_size, kv_split, storage;
    int32_t format, pow2, fp8_math;  // fp8_math: queries and probabilities are quantised, too
    float scale;
};
void run_attention(const void* args, Team& team);

struct AttentionGradArgs {
    int64_t rows;
    const void *q, *k, *v, *out, *d_out;  // rows as above, k and v as given to kv_write
    const float *key_scales, *value_scales;  // calibrated: [num_kv_heads]; else null, and found anew from the rows
    const float* lse;
    const int32_t* sample_starts;  // [num_samples + 1]; every sample starts at position 0
    int64_t num_samples, num_tiles;  // num_tiles: sum over samples of ceil(length / 64)
    void *dq, *dk, *dv;              // storage dtype
    void* workspace;                 // num_tiles * num_heads * attention_grad_bytes(head_dim, storage), 64-byte aligned
    int32_t num_heads, num_kv_heads, head_dim, leaves, storage;
    int32_t format, pow2, fp8_math;
    float scale;
};
void run_attention_grad(const void* args, Team& team);

// Workspace of one (tile of 64 rows, query head): q and d_out packed twice, log-sum-exp, delta, scales of q, the dQ sums,
// progress.
constexpr int64_t attention_grad_bytes(int64_t head_dim, bool is_bf16) {
    return 4 * BLOCK_KEYS * head_dim * (is_bf16 ? 2 : 4) + BLOCK_KEYS * head_dim * 4 + 3 * BLOCK_KEYS * 4 + 64;
}

namespace {

// The multiply-add primitive per storage dtype: one step takes WIDTH elements of the reduced axis.
template <class T> struct Step;
template <> struct Step<float> {
    static constexpr int WIDTH = 1;
    typedef F16 Lanes;
    static inline F16 lanes(const float* p) { return load(p); }
    static inline F16 spread(const float* p) { return set1(*p); }
    static inline F16 add(F16 acc, F16 a, F16 b) { return fma(a, b, acc); }
};
template <> struct Step<bf16> {
    static constexpr int WIDTH = 2;
    typedef P16 Lanes;
    static inline P16 lanes(const bf16* p) { return load_pairs(p); }
    static inline P16 spread(const bf16* p) { return set1_pair(p); }
    static inline F16 add(F16 acc, P16 a, P16 b) { return dot_pairs(acc, a, b); }
};

// Accumulators held in registers: MAX_ROWS x MAX_LANES vectors of sixteen. No bit depends on these two.
#if defined(__AVX512F__)
constexpr int MAX_ROWS = 6, MAX_LANES = 4;
#elif defined(__AVX2__)
constexpr int MAX_ROWS = 3, MAX_LANES = 2;
#else
constexpr int MAX_ROWS = 3, MAX_LANES = 1;
#endif

// acc[r][c] runs over `steps` steps: a + r * a_stride is row r (WIDTH elements per step), b[c] + s * b_stride the
// sixteen columns of step s.
template <class T, int ROWS, int COLS>
static inline __attribute__((always_inline)) void accumulate(
    F16 (&acc)[ROWS][COLS], int64_t steps, const T* a, int64_t a_stride, const T* const (&b)[COLS], int64_t b_stride) {
    constexpr int W = Step<T>::WIDTH;
    for (int64_t s = 0; s < steps; s++) {
        typename Step<T>::Lanes lanes[COLS];
#pragma GCC unroll 8
        for (int c = 0; c < COLS; c++) lanes[c] = Step<T>::lanes(b[c] + s * b_stride);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            const typename Step<T>::Lanes word = Step<T>::spread(a + r * a_stride + s * W);
#pragma GCC unroll 8
            for (int c = 0; c < COLS; c++) acc[r][c] = Step<T>::add(acc[r][c], word, lanes[c]);
        }
    }
}

// Calls function.template call<T, ROWS, COLS>() for run-time rows <= MAX_ROWS and cols <= MAX_LANES.
template <int ROWS, class F> static inline void with_cols(int cols, F& function) {
    switch (cols) {
        case 1: return function.template call<ROWS, 1>();
#if defined(__AVX2__) || defined(__AVX512F__)
        case 2: return function.template call<ROWS, 2>();
#endif
#if defined(__AVX512F__)
        case 3: return function.template call<ROWS, 3>();
        case 4: return function.template call<ROWS, 4>();
#endif
    }
}
template <class F> static inline void with_size(int rows, int cols, F& function) {
    switch (rows) {
        case 1: return with_cols<1>(cols, function);
        case 2: return with_cols<2>(cols, function);
        case 3: return with_cols<3>(cols, function);
#if defined(__AVX512F__)
        case 4: return with_cols<4>(cols, function);
        case 5: return with_cols<5>(cols, function);
        case 6: return with_cols<6>(cols, function);
#endif
    }
}

// fma of one number, rounded as F16's fma is on this instruction set.
static inline float fma_one(float a, float b, float c) {
#if defined(__FMA__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

// Bump allocation inside a thread's scratch, 64-byte aligned.
struct Carver {
    char* base;
    int64_t used = 0;
    template <class T> T* take(int64_t count) {
        char* p = base + used;
        used += (count * int64_t(sizeof(T)) + 63) / 64 * 64;
        return reinterpret_cast<T*>(p);
    }
};

}  // namespace
}  // namespace zg
