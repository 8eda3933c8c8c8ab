// SiLU(gate) * up and its gradients (docs/numerics.md, "SiLU * up").
#pragma once
#include "team.h"

namespace zg {

// out = rn((g * sig) * u), e = exp(-|g|), sig = (g >= 0 ? 1 : e) / (1 + e).
struct SiluMulArgs {
    int64_t rows;
    const void *gate, *up;  // [rows, width]
    void* out;
    int64_t width;
    int32_t storage;
};
void run_silu_mul(const void* args, Team& team);

// With rest = (g >= 0 ? e : 1) / (1 + e), which is 1 - sig without cancellation:
//   d_gate = rn((d * u) * (sig * fma(g, rest, 1))), d_up = rn(d * (g * sig)).
struct SiluMulGradArgs {
    int64_t rows;
    const void *gate, *up, *d_out;
    void *d_gate, *d_up;
    int64_t width;
    int32_t storage;
};
void run_silu_mul_grad(const void* args, Team& team);

}  // namespace zg
