"""Inside each expert SiLU times up is rounded once; the model rounds SiLU first.

Met between the eager model and fused expert kernels.
"""

import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from zerogap.diagnose.corpus.experts import expert_outputs
from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "experts/rounding"


class FusedExperts(Qwen3MoeExperts):
    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(x)
        for token, update in expert_outputs(self, x, chosen, weights, fused=True):
            total.index_add_(0, token, update.to(total.dtype))
        return total


def plant(model: Model) -> None:
    turn(model, "mlp.experts", FusedExperts)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, family="qwen3_moe")
