// Row copies and the embedding's gradient. Threads share the gradient by columns, so that each sum has one owner.
#include "embedding.h"
#include "lanes.h"

namespace zg {
namespace {

constexpr int64_t STRIP = 4 * LANES;
constexpr int32_t LATER = int32_t(0x80000000u);  // flag in `next`: an earlier row of the block has the same id

// next[t] = the following row of the block with t's id (0: none; row 0 follows nobody), and LATER where t is not the first.
void link_block(const EmbeddingGradArgs& a, int64_t first, int64_t last) {
    for (int64_t t = first; t < last; t++) a.next[t] = 0;
    for (int64_t t = first; t < last; t++) {
        for (int64_t u = t + 1; u < last; u++) {
            if (a.ids[u] != a.ids[t]) continue;
            a.next[t] |= int32_t(u);
            a.next[u] |= LATER;
            break;
        }
    }
}

template <typename S> void add_strip(const EmbeddingGradArgs& a, int64_t column) {
    const int64_t columns = min_of(STRIP, a.width - column);
    over_blocks(a.pack_starts, a.num_packs, [&](int64_t first, int64_t last) {
        for (int64_t t = first; t < last; t++) {
            if (a.next[t] & LATER) continue;
            float* acc = a.acc + a.ids[t] * a.width + column;
            over_lanes(columns, [&](int64_t i, int64_t n) {
                F16 sum = zero();
                for (int64_t u = t;; ) {
                    sum = sum + load_part(static_cast<const S*>(a.dy) + u * a.width + column + i, n);
                    u = a.next[u] & ~LATER;
                    if (!u) break;
                }
                store_part(acc + i, load_part(acc + i, n) + sum, n);
            });
        }
    });
}

template <typename S> void backward(const EmbeddingGradArgs& a, Team& team) {
    for (int64_t strip; (strip = team.next(1)) * STRIP < a.width;) add_strip<S>(a, strip * STRIP);
}

}  // namespace

void run_gather(const void* args, Team& team) {
    const GatherArgs& a = *static_cast<const GatherArgs*>(args);
    const int64_t step = rows_per_item(a.row_bytes / 2);
    for (int64_t first; (first = team.next(0) * step) < a.rows;)
        for (int64_t r = first; r < min_of(first + step, a.rows); r++)
            memcpy(static_cast<char*>(a.out) + r * a.row_bytes, static_cast<const char*>(a.source) + a.index[r] * a.row_bytes, a.row_bytes);
}

void run_scatter(const void* args, Team& team) {
    const ScatterArgs& a = *static_cast<const ScatterArgs*>(args);
    const int64_t step = rows_per_item(a.row_bytes / 2);
    for (int64_t first; (first = team.next(0) * step) < a.rows;)
        for (int64_t r = first; r < min_of(first + step, a.rows); r++)
            memcpy(static_cast<char*>(a.out) + a.index[r] * a.row_bytes, static_cast<const char*>(a.source) + r * a.row_bytes, a.row_bytes);
}

void run_embedding_grad(const void* args, Team& team) {
    const EmbeddingGradArgs& a = *static_cast<const EmbeddingGradArgs*>(args);
    int64_t block = 0, mine = team.next(0);
    over_blocks(a.pack_starts, a.num_packs, [&](int64_t first, int64_t last) {
        if (block++ != mine) return;
        link_block(a, first, last);
        mine = team.next(0);
    });
    team.barrier();
    a.storage ? backward<bf16>(a, team) : backward<float>(a, team);
}

}  // namespace zg
