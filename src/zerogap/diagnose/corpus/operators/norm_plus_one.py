"""The norm multiplies by 1 + weight, as Gemma's checkpoints want it, on a checkpoint that stores the weight itself.

Met when a fused kernel with a Gemma flag is called for another family.
"""

import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "norm/formula"


class PlusOneNorm(LlamaRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (1 + self.weight) * wide.to(x.dtype)


def plant(model: Model) -> None:
    turn(model, "layers.0.post_attention_layernorm", PlusOneNorm)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant)
