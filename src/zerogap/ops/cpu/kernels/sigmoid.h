// The logistic function of sixteen lanes and what is left of it to one: what SiLU and sigmoid routers share.
#pragma once
#include "simd.h"

namespace zg {

struct Sigmoid { F16 sig, rest; };  // sigmoid(g) and 1 - sigmoid(g)

// e = exp(-|g|), which never overflows: sig = (g >= 0 ? 1 : e) / (1 + e), rest = (g >= 0 ? e : 1) / (1 + e).
static inline Sigmoid sigmoid(F16 g) {
    const F16 one = set1(1.0f), e = exp(negate(abs(g))), sum = one + e;
    const M16 positive = greater_equal(g, zero());
    return {select(positive, one, e) / sum, select(positive, e, one) / sum};
}

}  // namespace zg
