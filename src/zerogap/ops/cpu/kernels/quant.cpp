// E4M3 codes of numbers and back, and the block quantiser of activations and weights.
#include "quant.h"
#include "e4m3.h"
#include "lanes.h"

namespace zg {

void run_encode(const void* args, Team& team) {
    const EncodeArgs& a = *static_cast<const EncodeArgs*>(args);
    for (int64_t first; (first = team.next(0) * ITEM_ELEMENTS) < a.rows;)
        over_lanes(min_of(ITEM_ELEMENTS, a.rows - first), [&](int64_t i, int64_t n) __attribute__((always_inline)) {
            const F16 x = load_part(a.x + first + i, n);
            encode_n(a.codes + first + i, x, n);
            store_part(a.grid + first + i, round_e4m3(x), n);
        });
}

void run_decode(const void* args, Team& team) {
    const DecodeArgs& a = *static_cast<const DecodeArgs*>(args);
    for (int64_t first; (first = team.next(0) * ITEM_ELEMENTS) < a.rows;)
        decode_row(a.codes + first, a.grid + first, min_of(ITEM_ELEMENTS, a.rows - first));
}

}  // namespace zg
