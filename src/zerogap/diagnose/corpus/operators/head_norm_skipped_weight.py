"""Query norms of a Qwen3 run over all heads together instead of over each head.

Met in ports of models with query/key norm: OLMo's norm spans the projection, Qwen3's a head.
"""

import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "norm/formula"


class WideNorm(Qwen3RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean((-2, -1), keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(x.dtype)


def plant(model: Model) -> None:
    turn(model, "q_norm", WideNorm)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, family="qwen3")
