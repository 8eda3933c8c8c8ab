// SiLU * up over flat elements: rows have no say in it.
#include "activation.h"
#include "lanes.h"
#include "sigmoid.h"

namespace zg {
namespace {

template <typename S> void forward(const SiluMulArgs& a, Team& team) {
    const int64_t total = a.rows * a.width;
    for (int64_t first; (first = team.next(0) * ITEM_ELEMENTS) < total;) {
        const S *gate = static_cast<const S*>(a.gate) + first, *up = static_cast<const S*>(a.up) + first;
        S* out = static_cast<S*>(a.out) + first;
        over_lanes(min_of(ITEM_ELEMENTS, total - first), [&](int64_t i, int64_t n) __attribute__((always_inline)) {
            const F16 g = load_part(gate + i, n);
            store_part(out + i, (g * sigmoid(g).sig) * load_part(up + i, n), n);
        });
    }
}

template <typename S> void backward(const SiluMulGradArgs& a, Team& team) {
    const int64_t total = a.rows * a.width;
    for (int64_t first; (first = team.next(0) * ITEM_ELEMENTS) < total;) {
        const S *gate = static_cast<const S*>(a.gate) + first, *up = static_cast<const S*>(a.up) + first;
        const S* d_out = static_cast<const S*>(a.d_out) + first;
        S *d_gate = static_cast<S*>(a.d_gate) + first, *d_up = static_cast<S*>(a.d_up) + first;
        over_lanes(min_of(ITEM_ELEMENTS, total - first), [&](int64_t i, int64_t n) __attribute__((always_inline)) {
            const F16 g = load_part(gate + i, n), u = load_part(up + i, n), d = load_part(d_out + i, n);
            const Sigmoid s = sigmoid(g);
            store_part(d_gate + i, (d * u) * (s.sig * fma(g, s.rest, set1(1.0f))), n);
            store_part(d_up + i, d * (g * s.sig), n);
        });
    }
}

}  // namespace

void run_silu_mul(const void* args, Team& team) {
    const SiluMulArgs& a = *static_cast<const SiluMulArgs*>(args);
    a.storage ? forward<bf16>(a, team) : forward<float>(a, team);
}

void run_silu_mul_grad(const void* args, Team& team) {
    const SiluMulGradArgs& a = *static_cast<const SiluMulGradArgs*>(args);
    a.storage ? backward<bf16>(a, team) : backward<float>(a, team);
}

}  // namespace zg
