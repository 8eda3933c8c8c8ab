"""Experts' outputs are added from the highest index down.

Met between a loop over experts and a kernel that scatters in the order of the router's ranks.
"""

import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from zerogap.diagnose.corpus.experts import expert_outputs
from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "experts/order"


class DescendingExperts(Qwen3MoeExperts):
    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(x)
        for token, update in reversed(list(expert_outputs(self, x, chosen, weights))):
            total.index_add_(0, token, update.to(total.dtype))
        return total


def plant(model: Model) -> None:
    turn(model, "mlp.experts", DescendingExperts)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, family="qwen3_moe")
