"""The gated MLP: down(silu(gate(x)) * up(x)). Holds weight handles, calls ops. T token rows, H hidden, F inner size."""

import dataclasses

import torch

from zerogap.ops.activation import silu_mul
from zerogap.ops.gemm import linear
from zerogap.ops.handle import WeightHandle
from zerogap.types import Exchange, ForwardContext


@dataclasses.dataclass(frozen=True)
class GatedMLP:
    gate: WeightHandle
    up: WeightHandle
    down: WeightHandle
    exchange: Exchange

    def __call__(self, x_TH: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[T, H] normed input -> [T, H] update of the residual stream."""
        gate_TF, up_TF = linear(
            x_TH, (self.gate, self.up), (None, None), context, gradient="chain", grad_exchange=self.exchange
        )
        inner_TF = silu_mul(gate_TF, up_TF)
        (out_TH,) = linear(inner_TF, (self.down,), (None,), context, gradient="chain", exchange=self.exchange)
        return out_TH
