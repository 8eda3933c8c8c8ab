"""Epsilon added after the square root instead of under it.

Met in hand-written kernels that were tested on inputs of unit size only.
"""

import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "norm/formula"


class OutsideNorm(LlamaRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide / (wide.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon)
        return self.weight * wide.to(x.dtype)


def plant(model: Model) -> None:
    turn(model, "input_layernorm|post_attention_layernorm|norm", OutsideNorm)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, dtype="float32")
