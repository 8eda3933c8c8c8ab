// RMSNorm forward and backward. Several rows advance together so that their chains overlap; no row sees another.
#include "norm.h"
#include "lanes.h"

namespace zg {
namespace {

inline float inverse_root(F16 squares, int64_t width, float eps) {
    return 1.0f / __builtin_sqrtf(lane_sum(squares) / float(width) + eps);
}

template <typename S, int R> void forward_rows(const NormArgs& a, int64_t first) {
    const int64_t width = a.width, start = first * width;
    const S* x = static_cast<const S*>(a.x) + start;
    const S* weight = static_cast<const S*>(a.weight);
    S* normed = static_cast<S*>(a.normed) + start;
    F16 squares[R];
    for (int r = 0; r < R; r++) squares[r] = zero();
    if (a.delta) {
        const S* delta = static_cast<const S*>(a.delta) + start;
        S* residual = static_cast<S*>(a.residual) + start;
        over_lanes(width, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
            for (int r = 0; r < R; r++) {
                const int64_t at = r * width + i;
                store_part(residual + at, load_part(x + at, n) + load_part(delta + at, n), n);
                const F16 v = load_part(residual + at, n);  // rounded
                squares[r] = fma(v, v, squares[r]);
            }
        });
        x = residual;
    } else {
        over_lanes(width, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
            for (int r = 0; r < R; r++) {
                const F16 v = load_part(x + r * width + i, n);
                squares[r] = fma(v, v, squares[r]);
            }
        });
    }
    F16 inverse[R];
    for (int r = 0; r < R; r++) inverse[r] = set1(inverse_root(squares[r], width, a.eps));
    over_lanes(width, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
        const F16 w = load_part(weight + i, n);
        for (int r = 0; r < R; r++) {
            const int64_t at = r * width + i;
            store_part(normed + at, (load_part(x + at, n) * inverse[r]) * w, n);
        }
    });
}

template <typename S> void forward(const NormArgs& a, Team& team) {
    const int64_t total = a.rows * a.heads, step = rows_per_item(a.width);
    for (int64_t first; (first = team.next(0) * step) < total;) {
        const int64_t last = min_of(first + step, total);
        for (; first + 4 <= last; first += 4) forward_rows<S, 4>(a, first);
        for (; first < last; first++) forward_rows<S, 1>(a, first);
    }
}

template <typename S, int R> void backward_rows(const NormGradArgs& a, int64_t first) {
    const int64_t width = a.width, start = first * width;
    const S* x = static_cast<const S*>(a.x) + start;
    const S* weight = static_cast<const S*>(a.weight);
    const S* dy = static_cast<const S*>(a.d_normed) + start;
    F16 squares[R], inverse[R], products[R];
    for (int r = 0; r < R; r++) squares[r] = products[r] = zero();
    over_lanes(width, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
        for (int r = 0; r < R; r++) {
            const F16 v = load_part(x + r * width + i, n);
            squares[r] = fma(v, v, squares[r]);
        }
    });
    for (int r = 0; r < R; r++) {
        a.inverse[first + r] = inverse_root(squares[r], width, a.eps);
        inverse[r] = set1(a.inverse[first + r]);
    }
    if (!a.dx) return;
    over_lanes(width, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
        const F16 w = load_part(weight + i, n);
        for (int r = 0; r < R; r++) {
            const int64_t at = r * width + i;
            products[r] = fma(load_part(dy + at, n) * w, load_part(x + at, n) * inverse[r], products[r]);
        }
    });
    F16 slope[R];
    for (int r = 0; r < R; r++) slope[r] = set1(lane_sum(products[r]) / float(width));
    S* dx = static_cast<S*>(a.dx) + start;
    const S* carried = a.d_residual ? static_cast<const S*>(a.d_residual) + start : nullptr;
    over_lanes(width, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
        const F16 w = load_part(weight + i, n);
        for (int r = 0; r < R; r++) {
            const int64_t at = r * width + i;
            const F16 normal = load_part(x + at, n) * inverse[r];
            F16 d = fma(negate(normal), slope[r], load_part(dy + at, n) * w) * inverse[r];
            if (carried) d = load_part(carried + at, n) + d;
            store_part(dx + at, d, n);
        }
    });
}

// One strip of 32 columns of one leaf: all blocks of all packs, ascending.
template <typename S> void weight_strip(const NormGradArgs& a, int64_t leaf, int64_t column) {
    const int64_t heads = a.heads / a.leaves, n0 = min_of(LANES, a.width - column), n1 = a.width - column - LANES;
    float* acc = a.acc + leaf * a.width + column;
    over_blocks(a.pack_starts, a.num_packs, [&](int64_t first, int64_t last) {
        F16 s0 = zero(), s1 = zero();
        for (int64_t t = first; t < last; t++) {
            for (int64_t h = leaf * heads; h < (leaf + 1) * heads; h++) {
                const int64_t row = t * a.heads + h;
                const S* x = static_cast<const S*>(a.x) + row * a.width + column;
                const S* dy = static_cast<const S*>(a.d_normed) + row * a.width + column;
                const F16 inverse = set1(a.inverse[row]);
                s0 = fma(load_part(dy, n0), load_part(x, n0) * inverse, s0);
                if (n1 > 0) s1 = fma(load_part(dy + LANES, n1), load_part(x + LANES, n1) * inverse, s1);
            }
        }
        store_part(acc, load_part(acc, n0) + s0, n0);
        if (n1 > 0) store_part(acc + LANES, load_part(acc + LANES, n1) + s1, n1);
    });
}

template <typename S> void backward(const NormGradArgs& a, Team& team) {
    const int64_t total = a.rows * a.heads, step = rows_per_item(a.width);
    for (int64_t first; (first = team.next(0) * step) < total;) {
        const int64_t last = min_of(first + step, total);
        for (; first + 4 <= last; first += 4) backward_rows<S, 4>(a, first);
        for (; first < last; first++) backward_rows<S, 1>(a, first);
    }
    if (!a.acc) return;
    team.barrier();
    const int64_t strips = ceil_div(a.width, 2 * LANES);
    for (int64_t item; (item = team.next(1)) < strips * a.leaves;)
        weight_strip<S>(a, item / strips, item % strips * 2 * LANES);
}

}  // namespace

void run_norm(const void* args, Team& team) {
    const NormArgs& a = *static_cast<const NormArgs*>(args);
    a.storage ? forward<bf16>(a, team) : forward<float>(a, team);
}

void run_norm_grad(const void* args, Team& team) {
    const NormGradArgs& a = *static_cast<const NormGradArgs*>(args);
    a.storage ? backward<bf16>(a, team) : backward<float>(a, team);
}

}  // namespace zg
