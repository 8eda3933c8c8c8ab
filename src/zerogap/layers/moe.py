"""A routed layer in place of the MLP: router, experts and shared experts, one op. Holds weights, computes nothing.

Shapes: T token rows, H hidden.
"""

import dataclasses

import torch

from zerogap.ops.moe import MoEWeights, Routing, moe
from zerogap.types import Exchange, ForwardContext


@dataclasses.dataclass(frozen=True)
class RoutedMLP:
    """`layer` is the decoder layer, under which a routing record files its choices."""

    weights: MoEWeights
    routing: Routing
    layer: int
    exchange: Exchange

    def __call__(self, x_TH: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[T, H] normed input -> [T, H] update of the residual stream."""
        return moe(x_TH, self.weights, self.routing, context, self.layer, self.exchange)
