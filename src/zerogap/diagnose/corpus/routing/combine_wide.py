"""Experts' outputs are added in FP32 and rounded once; the model adds them up in BF16.

Met between the eager model and every fused expert kernel.
"""

import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from zerogap.diagnose.corpus.experts import expert_outputs
from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "experts/accumulate"


class WideExperts(Qwen3MoeExperts):
    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(x.shape, dtype=torch.float32)
        for token, update in expert_outputs(self, x, chosen, weights):
            total.index_add_(0, token, update.float())
        return total.to(x.dtype)


def plant(model: Model) -> None:
    turn(model, "mlp.experts", WideExperts)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, family="qwen3_moe")
