"""The norm divides by a square root instead of multiplying by the reciprocal one.

Met between kernels whose authors thought the two were the same; visible in FP32.
"""

import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "norm/primitive"


class DividingNorm(LlamaRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide / torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(x.dtype)


def plant(model: Model) -> None:
    turn(model, "input_layernorm|post_attention_layernorm|norm", DividingNorm)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, dtype="float32")
