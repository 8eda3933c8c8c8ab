// Rows by index: embedding look-up, rows of the hidden state for the head, and their gradients.
#pragma once
#include "team.h"

namespace zg {

// out[r] = source[index[r]], rows of `row_bytes` bytes.
struct GatherArgs {
    int64_t rows;
    const void* source;
    const int64_t* index;  // [rows]
    void* out;
    int64_t row_bytes;
};
void run_gather(const void* args, Team& team);

// out[index[r]] = source[r]; indices differ from each other, other rows of `out` stay as they are.
struct ScatterArgs {
    int64_t rows;
    const void* source;
    const int64_t* index;
    void* out;
    int64_t row_bytes;
};
void run_scatter(const void* args, Team& team);

// For each block of 128 rows of each pack, ascending, and each id in it: acc[id] += sum from +0 over the block's rows
// with that id, ascending.
struct EmbeddingGradArgs {
    int64_t rows;
    const void* dy;             // [rows, width]
    const int64_t* ids;         // [rows]
    const int32_t* pack_starts;  // [num_packs + 1]
    int32_t* next;              // scratch [rows]
    float* acc;                 // [vocabulary, width]
    int64_t num_packs, width;
    int32_t storage;
};
void run_embedding_grad(const void* args, Team& team);

}  // namespace zg
