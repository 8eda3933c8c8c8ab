// Log-probabilities, entropies and kept sets of rows of FP32 logits, and the gradient of the logits
// (docs/numerics.md, "LM head, log-prob" and "kept set").
#pragma once
#include "team.h"

namespace zg {

enum KeptKind : int32_t { KEEP_ALL = 0, KEEP_RULE = 1, KEEP_BITS = 2 };

// A kept set on one row's own logits: ids with y > cut, or y == cut and id <= last, whose exp(y - max) >= least.
struct KeptRule {
    float cut;
    int32_t last;
    float least;
    int32_t kind;
};

// What is computed per (row, vocabulary leaf) before rows are combined; one cache line.
struct LeafState {
    float max;       // largest logit (of the kept ids where they are given as bits)
    float poison;    // +-0, or NaN where a logit is NaN or infinite
    float sum;       // of exp(y - max) over kept ids
    float weighted;  // of exp(y - max) * (y - max)
    int64_t mass;    // of round(2^40 exp(y - max)); only where asked for
    int64_t count;   // kept ids
    uint64_t digest;
    int64_t unused[3];
};
static_assert(sizeof(LeafState) == 64, "the Python side allocates 8 words per leaf");

// The part of the arguments that sampling and log-probs share. `bits` is null or [rows, ceil(vocab / 64)] 64-bit words
// (id i is bit i % 64 of word i / 64): then filtered rows keep these ids and no filter is evaluated.
struct VocabularyRows {
    const float* logits;                           // [rows, vocab]
    const float* temperature;                      // [rows]; 0: greedy, and y is the untempered logit
    const int32_t* top_k;                          // [rows]; 0: off
    const float *top_p, *min_p;                    // [rows]; 1 and 0: off
    const uint64_t* bits;
    uint64_t* bits_out;                            // null, or as `bits`: the kept sets of this call
    LeafState* leaves;                             // [rows, ceil(vocab / leaf_size)] scratch
    KeptRule* rules;                               // [rows]
    float *logp, *entropy;                         // [rows]
    int32_t* count;                                // [rows]; vocab where nothing is filtered
    uint64_t* digest;                              // [rows]; 0 where nothing is filtered
    int64_t vocab, leaf_size;
};

struct LogprobArgs {
    int64_t rows;
    VocabularyRows v;
    const int64_t* targets;     // [rows]
    float *row_max, *row_sum;   // [rows] for the gradient
};
void run_logprob(const void* args, Team& team);

// out[r, i] = (d_logp (1{i = target} - p_i) - d_entropy p_i (logp_i + H)) / T, +0 for excluded ids; FP32, rounded once.
// A row whose two incoming derivatives are zero is all +0.
struct LogprobGradArgs {
    int64_t rows;
    const float* logits;
    const float* temperature;
    const uint64_t* bits;
    const KeptRule* rules;
    const int64_t* targets;
    const float *row_max, *row_sum, *entropy;
    const float *d_logp, *d_entropy;
    void* out;                  // [rows, vocab] storage dtype
    int64_t vocab, leaf_size;
    int32_t storage;
};
void run_logprob_grad(const void* args, Team& team);

}  // namespace zg
