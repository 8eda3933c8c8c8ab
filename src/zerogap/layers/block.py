"""One decoder layer. The residual stream and the update that is still to be added travel as a pair, so that the
addition, its rounding and the norm that follows are one op, forward and backward."""

import dataclasses

import torch

from zerogap.layers.attention import Attention
from zerogap.layers.latent_attention import LatentAttention
from zerogap.layers.mlp import GatedMLP
from zerogap.layers.moe import RoutedMLP
from zerogap.ops.handle import WeightHandle
from zerogap.ops.norm import rms_norm
from zerogap.types import ForwardContext, LayerKV


@dataclasses.dataclass(frozen=True)
class Block:
    input_norm: WeightHandle
    attention: Attention | LatentAttention
    post_norm: WeightHandle
    mlp: GatedMLP | RoutedMLP
    norm_eps: float

    def __call__(
        self,
        residual_TH: torch.Tensor,
        update_TH: torch.Tensor | None,
        rope_table: torch.Tensor,
        kv: LayerKV,
        context: ForwardContext,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(residual stream, update of the previous block or None) -> the same pair after this block."""
        residual_TH, x_TH = rms_norm(residual_TH, update_TH, self.input_norm, self.norm_eps, context)
        update_TH = self.attention(x_TH, rope_table, kv, context)
        residual_TH, x_TH = rms_norm(residual_TH, update_TH, self.post_norm, self.norm_eps, context)
        return residual_TH, self.mlp(x_TH, context)
