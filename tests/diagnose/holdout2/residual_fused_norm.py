"""The norm reads the FP32 sum of stream and update; only the stored stream is rounded to BF16.

Met with fused add and norm kernels that keep the sum in registers.
"""

from typing import Any

import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from zerogap.diagnose.corpus.open_modules import OpenLayer
from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = ("residual/rounding", "norm/rounding")


class WideNorm(LlamaRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        mean = wide.pow(2).mean(-1, keepdim=True)
        return self.weight * (wide * torch.rsqrt(mean + self.variance_epsilon)).to(self.weight.dtype)


class FusedLayer(OpenLayer):
    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        update, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        wide = hidden_states.float() + update.float()
        return self.add(wide.to(update.dtype), self.mlp(self.post_attention_layernorm(wide)))


def plant(model: Model) -> None:
    turn(model, "post_attention_layernorm", WideNorm)
    turn(model, r"layers\.\d+", FusedLayer)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant)
