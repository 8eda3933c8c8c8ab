// Elementwise optimizer kernels; tails run through the same lanes as whole vectors.
#include "optim.h"
#include "lanes.h"

namespace zg {
namespace {

constexpr int64_t STEP = 4 * ITEM_ELEMENTS;

}  // namespace

void run_adamw(const void* args, Team& team) {
    const AdamWArgs& a = *static_cast<const AdamWArgs*>(args);
    const F16 scale = set1(a.gradient_scale), beta1 = set1(a.beta1), rest1 = set1(a.rest1), beta2 = set1(a.beta2),
              rest2 = set1(a.rest2), decay = set1(a.decay), step = negate(set1(a.step_size)),
              correction = set1(a.root_correction), eps = set1(a.eps);
    for (int64_t start; (start = team.next(0) * STEP) < a.rows;) {
        float *master = a.master + start, *first = a.first + start, *second = a.second + start;
        const float* gradient = a.gradient + start;
        over_lanes(min_of(STEP, a.rows - start), [&](int64_t i, int64_t n) __attribute__((always_inline)) {
            const F16 g = load_part(gradient + i, n) * scale;
            const F16 m = fma(beta1, load_part(first + i, n), rest1 * g);
            const F16 v = fma(beta2, load_part(second + i, n), (rest2 * g) * g);
            const F16 ratio = m / fma(sqrt(v), correction, eps);
            store_part(first + i, m, n);
            store_part(second + i, v, n);
            store_part(master + i, fma(step, ratio, load_part(master + i, n) * decay), n);
        });
    }
}

void run_square_sums(const void* args, Team& team) {
    const SquareSumsArgs& a = *static_cast<const SquareSumsArgs*>(args);
    for (int64_t chunk; (chunk = team.next(0)) * NORM_CHUNK < a.rows;) {
        const float* x = a.x + chunk * NORM_CHUNK;
        const int64_t count = min_of(NORM_CHUNK, a.rows - chunk * NORM_CHUNK);
        double lane[LANES] = {0};
        int64_t i = 0;
        // The square of an FP32 number is exact in FP64: fused or not is the same.
        for (; i + LANES <= count; i += LANES)
            for (int l = 0; l < LANES; l++) lane[l] += double(x[i + l]) * double(x[i + l]);
        for (int l = 0; i < count; i++, l++) lane[l] += double(x[i]) * double(x[i]);
        for (int half = LANES / 2; half; half /= 2)
            for (int l = 0; l < half; l++) lane[l] += lane[l + half];
        a.sums[chunk] = lane[0];
    }
}

void run_add(const void* args, Team& team) {
    const AddArgs& a = *static_cast<const AddArgs*>(args);
    for (int64_t start; (start = team.next(0) * STEP) < a.rows;)
        over_lanes(min_of(STEP, a.rows - start), [&](int64_t i, int64_t n) __attribute__((always_inline)) {
            store_part(a.out + start + i, load_part(a.a + start + i, n) + load_part(a.b + start + i, n), n);
        });
}

}  // namespace zg
