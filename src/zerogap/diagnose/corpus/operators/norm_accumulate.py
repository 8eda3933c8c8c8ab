"""The sum of squares is accumulated in BF16: the cast to FP32 was lost.

Met when autocast, or a custom kernel, keeps the input's dtype for the reduction.
"""

import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from zerogap.diagnose.corpus.arithmetic import chain
from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "norm/accumulate"


class NarrowNorm(LlamaRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = chain(x.float().pow(2).unbind(-1), torch.bfloat16).float()
        mean = total[..., None] / x.shape[-1]
        return self.weight * (x.float() * torch.rsqrt(mean + self.variance_epsilon)).to(x.dtype)


def plant(model: Model) -> None:
    turn(model, "input_layernorm|post_attention_layernorm|norm", NarrowNorm)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant)
