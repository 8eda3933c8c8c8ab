"""The norm subtracts the mean first: LayerNorm where RMSNorm is meant.

Met in ports whose template had LayerNorm; the model still talks, only worse.
"""

import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "norm/formula"


class CentredNorm(LlamaRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float() - x.float().mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(x.dtype)


def plant(model: Model) -> None:
    turn(model, "layers.1.input_layernorm", CentredNorm)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant)
