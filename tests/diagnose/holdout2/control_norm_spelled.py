"""A harmless difference: the norm is spelled with a product for the square; the same bits.

Met between two editions of one model file.
"""

import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "clean"


class Spelled(LlamaRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        mean = (wide * wide).mean(-1, keepdim=True)
        return self.weight * (wide * torch.rsqrt(mean + self.variance_epsilon)).to(x.dtype)


def plant(model: Model) -> None:
    turn(model, r"input_layernorm|post_attention_layernorm|norm", Spelled)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(
        plant,
    )
