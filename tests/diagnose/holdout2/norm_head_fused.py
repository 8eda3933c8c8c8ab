"""The fused kernel of head norm and rotation multiplies by the weight before it rounds; the module rounds first.

Met with fused QK norm and RoPE kernels of engines.
"""

import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "norm/rounding"


class FusedNorm(Qwen3RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        mean = wide.pow(2).mean(-1, keepdim=True)
        return (wide * torch.rsqrt(mean + self.variance_epsilon) * self.weight.float()).to(x.dtype)


def plant(model: Model) -> None:
    turn(model, r"q_norm|k_norm", FusedNorm)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, family="qwen3")
