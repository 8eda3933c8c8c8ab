"""Norms of queries and keys are taken over all heads at once instead of head by head.

Met between OLMo 2's and Qwen3's use of the same names.
"""

import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "norm/formula"


class WholeRowNorm(Qwen3RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        mean = wide.pow(2).mean((-2, -1), keepdim=True)
        return self.weight * (wide * torch.rsqrt(mean + self.variance_epsilon)).to(x.dtype)


def plant(model: Model) -> None:
    turn(model, r"q_norm|k_norm", WholeRowNorm)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, family="qwen3")
