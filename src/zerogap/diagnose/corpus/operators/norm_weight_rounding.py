"""The norm multiplies by its weight in FP32 and rounds once; transformers rounds first and multiplies in BF16.

Met between every inference engine with a fused RMSNorm and a trainer with the eager one.
"""

import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "norm/rounding"


class FusedNorm(LlamaRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight.float() * wide).to(x.dtype)


def plant(model: Model) -> None:
    turn(model, "input_layernorm|post_attention_layernorm|norm", FusedNorm)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant)
