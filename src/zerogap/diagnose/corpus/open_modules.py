"""Modules of a transformers Llama with the inner steps as methods, so that a fault can replace one of them; and a whole
model whose rows depend on nothing but their own sequence, for faults of a path, a neighbour or a run.

Unchanged, `OpenAttention` and `OpenLayer` compute the same bits as the classes they extend.
"""

from typing import Any

import torch
from transformers.models.llama.modeling_llama import (
    ALL_ATTENTION_FUNCTIONS,
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaRMSNorm,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from zerogap.diagnose.corpus.arithmetic import exact_attention, exact_linear
from zerogap.diagnose.corpus.workshop import Model, attend, turn

Pair = tuple[torch.Tensor, torch.Tensor]


class OpenAttention(LlamaAttention):
    """Attention whose rotation is `rotate`."""

    def rotate(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Pair:
        """Queries and keys [B, H, T, D] with tables [B, T, D] -> rotated ones."""
        return apply_rotary_pos_emb(q, k, cos, sin)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Any = None,
        attention_mask: torch.Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> Any:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        parts = (self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (part(hidden_states).view(shape).transpose(1, 2) for part in parts)
        query, key = self.rotate(query, key, *position_embeddings)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        function = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        dropout = self.attention_dropout if self.training else 0.0
        out, weights = function(
            self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
        )
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1).contiguous()), weights


class OpenLayer(LlamaDecoderLayer):
    """A decoder layer whose additions to the residual stream are `add`."""

    def add(self, residual: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        """The residual stream after an update."""
        return residual + update

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        update, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        hidden_states = self.add(hidden_states, update)
        return self.add(hidden_states, self.mlp(self.post_attention_layernorm(hidden_states)))


# ---------------------------------------------------------------------------------------------------- exact rows


class ExactLinear(torch.nn.Linear):
    """Accumulates in FP64 and rounds once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return exact_linear(x, self.weight, self.bias)


class ExactNorm(LlamaRMSNorm):
    """The mean in FP64; then as transformers does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.double().pow(2).mean(-1, keepdim=True).float()
        return self.weight * (x.float() * torch.rsqrt(mean + self.variance_epsilon)).to(x.dtype)


class ExactMLP(LlamaMLP):
    """SiLU in FP64, rounded, times up, rounded."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate_proj(x).double()
        return self.down_proj((gate / (1.0 + torch.exp(-gate))).to(x.dtype) * self.up_proj(x))


def exact(model: Model) -> None:
    """Make every op of a BF16 Llama independent of all rows but its own sequence's earlier ones: padding, batches,
    chunks and decoding do not show in any bit. (FP64 sums of BF16 products are exact, or differ far below BF16.)"""
    turn(model, r"\w+_proj|lm_head", ExactLinear)
    turn(model, "input_layernorm|post_attention_layernorm|norm", ExactNorm)
    turn(model, "mlp", ExactMLP)
    attend(model, "exact", exact_attention)
