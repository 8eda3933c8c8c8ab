"""Latent attention: projections down to the latents, the op over latent rows, output projection.

Holds weight handles and sizes, calls ops, computes nothing itself. Shapes: T token rows, H hidden, Q = query heads *
(unrotated + rotated part), R = latent + rotated part of the key, V = heads * value size, C = compressed query.
"""

import dataclasses

import torch

from zerogap.ops.gemm import linear
from zerogap.ops.handle import WeightHandle
from zerogap.ops.latent import LatentSizes
from zerogap.ops.mla import mla
from zerogap.ops.norm import rms_norm
from zerogap.types import Exchange, ForwardContext, LayerKV


@dataclasses.dataclass(frozen=True)
class LatentHead:
    """Facts of a latent attention block, and the contract's cuts.

    Attributes:
        sizes: heads and their parts.
        scale: factor of the scores, as a double; ops round it to FP32.
        norm_eps: of the norms of the latents.
        kv_split: keys per span.
        leaves: of sums over query heads.
        interleaved: rotation turns neighbouring elements.
    """

    sizes: LatentSizes
    scale: float
    norm_eps: float
    kv_split: int
    leaves: int
    interleaved: bool


@dataclasses.dataclass(frozen=True)
class CompressedQuery:
    """Where queries are compressed, too: the norm of the latent, and the projection up to heads."""

    norm: WeightHandle
    up: WeightHandle


@dataclasses.dataclass(frozen=True)
class LatentAttention:
    """One latent attention block.

    Attributes:
        head: sizes and cuts.
        query: [Q, H], or [C, H] where `compressed` says how it goes on.
        latent: `kv_a_proj_with_mqa`, [R, H].
        biases: of `query` (only where queries are compressed) and `latent`; None where the model has none.
        norm, expansion: of the latent of keys and values (`kv_a_layernorm`, `kv_b_proj`).
        output, output_bias: [H, V].
    """

    head: LatentHead
    query: WeightHandle
    compressed: CompressedQuery | None
    latent: WeightHandle
    biases: tuple[WeightHandle | None, WeightHandle | None]
    norm: WeightHandle
    expansion: WeightHandle
    output: WeightHandle
    output_bias: WeightHandle | None
    exchange: Exchange

    def __call__(
        self, x_TH: torch.Tensor, rope_table: torch.Tensor, kv: LayerKV, context: ForwardContext
    ) -> torch.Tensor:
        """[T, H] normed input -> [T, H] update of the residual stream."""
        head = self.head
        q_TQ, latent_TR = linear(x_TH, (self.query, self.latent), self.biases, context, gradient="trees")
        if self.compressed is not None:
            _, q_TC = rms_norm(q_TQ, None, self.compressed.norm, head.norm_eps, context)
            (q_TQ,) = linear(
                q_TC, (self.compressed.up,), (None,), context, gradient="trees", grad_exchange=self.exchange
            )
        mixed_TV = mla(
            q_TQ,
            latent_TR,
            self.norm,
            self.expansion,
            rope_table,
            kv,
            context,
            sizes=head.sizes,
            scale=head.scale,
            norm_eps=head.norm_eps,
            kv_split=head.kv_split,
            leaves=head.leaves,
            interleaved=head.interleaved,
        )
        (out_TH,) = linear(
            mixed_TV, (self.output,), (self.output_bias,), context, gradient="chain", exchange=self.exchange
        )
        return out_TH
