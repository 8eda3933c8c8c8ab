"""Self-attention: projections, optional query/key norm, RoPE, paged attention, output projection.

Holds weight handles and sizes, calls ops, computes nothing itself. Shapes: T token rows, H hidden size, Q = query heads
* D, K = key/value heads * D.
"""

import dataclasses

import torch

from zerogap.ops.attention import attention
from zerogap.ops.gemm import linear
from zerogap.ops.handle import WeightHandle
from zerogap.ops.norm import head_norm
from zerogap.ops.rope import rope
from zerogap.types import Exchange, ForwardContext, LayerKV


@dataclasses.dataclass(frozen=True)
class AttentionSizes:
    """Heads and the contract's cuts. `leaves`: leaves of sums over query heads; `kv_leaves`: over key/value heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    kv_split: int
    leaves: int
    kv_leaves: int

    @property
    def scale(self) -> float:
        """1 / sqrt(D), as a double; ops round it to FP32."""
        return self.head_dim**-0.5


@dataclasses.dataclass(frozen=True)
class Attention:
    """One attention block. Biases and query/key norms are None where the model has none."""

    sizes: AttentionSizes
    projections: tuple[WeightHandle, WeightHandle, WeightHandle]
    biases: tuple[WeightHandle | None, WeightHandle | None, WeightHandle | None]
    output: WeightHandle
    output_bias: WeightHandle | None
    query_norm: WeightHandle | None
    key_norm: WeightHandle | None
    exchange: Exchange

    def __call__(
        self, x_TH: torch.Tensor, rope_table: torch.Tensor, kv: LayerKV, context: ForwardContext
    ) -> torch.Tensor:
        """[T, H] normed input -> [T, H] update of the residual stream."""
        s = self.sizes
        q_TQ, k_TK, v_TK = linear(
            x_TH, self.projections, self.biases, context, gradient="trees", grad_exchange=self.exchange
        )
        if self.query_norm is not None and self.key_norm is not None:
            q_TQ = head_norm(q_TQ, self.query_norm, s.num_heads, s.norm_eps, s.leaves, context)
            k_TK = head_norm(k_TK, self.key_norm, s.num_kv_heads, s.norm_eps, s.kv_leaves, context)
        q_TQ, k_TK = rope(q_TQ, k_TK, rope_table, s.head_dim, context)
        mixed_TQ = attention(
            q_TQ,
            k_TK,
            v_TK,
            kv,
            context,
            num_heads=s.num_heads,
            num_kv_heads=s.num_kv_heads,
            head_dim=s.head_dim,
            scale=s.scale,
            kv_split=s.kv_split,
            leaves=s.leaves,
        )
        (out_TH,) = linear(
            mixed_TQ, (self.output,), (self.output_bias,), context, gradient="chain", exchange=self.exchange
        )
        return out_TH
