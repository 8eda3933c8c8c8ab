// RoPE. Sine and cosine are our own, of FP64 additions and multiplications only, so that every build and every C library
// makes the same table.
#include "rope.h"
#include "lanes.h"

namespace zg {
namespace {

// Reduction by pi/2 in three parts of 33 bits and the polynomials of fdlibm (k_sin.c, k_cos.c); |x| < 2^20.
void sine_cosine(double x, double* sine, double* cosine) {
    const double n = __builtin_rint(x * 6.36619772367581382433e-01);
    const double r = ((x - n * 1.57079632673412561417e+00) - n * 6.07710050630396597660e-11) - n * 2.02226624879595063154e-21;
    const double z = r * r;
    const double odd = 8.33333333332248946124e-03 + z * (-1.98412698298579493134e-04 + z * (2.75573137070700676789e-06 +
                       z * (-2.50507602534068634195e-08 + z * 1.58969099521155010221e-10)));
    const double even = z * (4.16666666666666019037e-02 + z * (-1.38888888888741095749e-03 + z * (2.48015872894767294178e-05 +
                        z * (-2.75573143513906633035e-07 + z * (2.08757232129817482790e-09 + z * -1.13596475577881948265e-11)))));
    const double s = r + z * r * (-1.66666666666666324348e-01 + z * odd), c = 1.0 - (0.5 * z - z * even);
    switch (int64_t(n) & 3) {
        case 0: *sine = s; *cosine = c; break;
        case 1: *sine = c; *cosine = -s; break;
        case 2: *sine = -s; *cosine = -c; break;
        default: *sine = -c; *cosine = s; break;
    }
}

// 16 pairs (2i, 2i + 1), of which n exist.
template <typename S> void rotate_pairs(const S* in, S* out, F16 c, F16 turn, int64_t n) {
    float both[2 * LANES], x[LANES], y[LANES];
    store(both, load_part(in, 2 * n)), store(both + LANES, load_part(in + LANES, 2 * n - LANES));
    for (int64_t i = 0; i < LANES; i++) x[i] = both[2 * i], y[i] = both[2 * i + 1];
    const F16 even = load(x), odd = load(y);
    store(x, fma(even, c, negate(odd * turn))), store(y, fma(odd, c, even * turn));
    for (int64_t i = 0; i < LANES; i++) both[2 * i] = x[i], both[2 * i + 1] = y[i];
    store_part(out, load(both), 2 * n), store_part(out + LANES, load(both + LANES), 2 * n - LANES);
}

template <typename S> void rotate(const S* in, S* out, const Turned& p, const float* table, const RopeArgs& a) {
    const int64_t half = a.head_dim / 2;
    over_lanes(half, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
        const F16 c = load_part(table + i, n), s = load_part(table + half + i, n), turn = a.inverse ? negate(s) : s;
        for (int64_t h = 0; h < p.heads; h++) {
            const S* from = in + h * p.head_stride;
            S* to = out + h * p.out_head_stride;
            if (a.interleaved) { rotate_pairs(from + 2 * i, to + 2 * i, c, turn, n); continue; }
            const F16 x = load_part(from + i, n), y = load_part(from + half + i, n);
            store_part(to + i, fma(x, c, negate(y * turn)), n);
            store_part(to + half + i, fma(y, c, x * turn), n);
        }
    });
}

template <typename S> void rotate_rows(const RopeArgs& a, Team& team) {
    const int64_t step = rows_per_item((a.parts[0].heads + a.parts[1].heads) * a.head_dim);
    for (int64_t first; (first = team.next(0) * step) < a.rows;) {
        for (int64_t t = first; t < min_of(first + step, a.rows); t++) {
            const float* table = a.table + int64_t(a.positions[t]) * a.head_dim;
            for (const Turned& p : a.parts)
                if (p.x) rotate(static_cast<const S*>(p.x) + t * p.row_stride, static_cast<S*>(p.out) + t * p.out_row_stride, p, table, a);
        }
    }
}

}  // namespace

void run_rope_table(const void* args, Team& team) {
    const RopeTableArgs& a = *static_cast<const RopeTableArgs*>(args);
    constexpr int64_t step = 64;
    for (int64_t first; (first = team.next(0) * step) < a.rows;) {
        for (int64_t p = first; p < min_of(first + step, a.rows); p++) {
            float* out = a.out + p * 2 * a.half;
            for (int64_t i = 0; i < a.half; i++) {
                double sine, cosine;
                sine_cosine(double(p) * a.frequencies[i], &sine, &cosine);
                out[i] = float(cosine * a.factor);
                out[a.half + i] = float(sine * a.factor);
            }
        }
    }
}

void run_rope(const void* args, Team& team) {
    const RopeArgs& a = *static_cast<const RopeArgs*>(args);
    a.storage ? rotate_rows<bf16>(a, team) : rotate_rows<float>(a, team);
}

}  // namespace zg
