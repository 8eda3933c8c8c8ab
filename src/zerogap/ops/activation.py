"""SiLU(gate) * up, the inner step of a gated MLP (Shazeer 2020, SwiGLU).

FP32 inside, rounded once per output, elementwise: nothing depends on rows, neighbours or threads. With e = exp(-|g|),
which never overflows, sig = (g >= 0 ? 1 : e) / (1 + e) and rest = (g >= 0 ? e : 1) / (1 + e) = 1 - sig:

    out = rn((g * sig) * u)
    d_gate = rn((d * u) * (sig * fma(g, rest, 1)))    d_up = rn(d * (g * sig))
"""

import torch
from torch.autograd.function import once_differentiable

from zerogap.ops import tap
from zerogap.ops.cpu import activation as kernels


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """SiLU(gate) * up: [T, F] storage dtype each -> [T, F]."""
    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        out = _SiluMul.apply(gate, up)
    else:
        out = kernels.silu_mul(gate, up)
    tap.observe("silu_mul", {"out": out}, {"gate": gate, "up": up})
    return out


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return kernels.silu_mul(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        gate, up = ctx.saved_tensors
        return kernels.silu_mul_grad(gate, up, d_out.contiguous())
