// Sampling from rows of FP32 logits, and the search for a row's kept set (docs/numerics.md, "kept set" and "sampling").
#pragma once
#include "logprob.h"

namespace zg {

struct SampleArgs {
    int64_t rows;
    VocabularyRows v;
    const int64_t* keys;  // [rows, 4], see philox.h
    int64_t* ids;         // [rows]
};
void run_sample(const void* args, Team& team);

// The generator alone, for its known answers: counters [rows, 4], keys [rows, 2], out [rows, 4].
struct PhiloxArgs {
    int64_t rows;
    const uint32_t *counters, *keys;
    uint32_t* out;
};
void run_philox(const void* args, Team& team);

}  // namespace zg
