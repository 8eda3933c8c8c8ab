"""An expert takes no more than its even share of a batch's tokens; those beyond are dropped.

Met with capacity factors of Switch-style training, left on in scoring: a token's result depends on who else is there.
"""

import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

# The formula is another one, and it shows as a dependence on what else is in the batch: both are true.
EXPECTED = ("experts/formula", "neighbours/content")


class LimitedExperts(Qwen3MoeExperts):
    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        capacity = -(-chosen.numel() // self.num_experts)
        weights = weights.clone()
        for expert in range(self.num_experts):
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            weights[rows[capacity:], places[capacity:]] = 0.0
        return super().forward(x, chosen, weights)


def plant(model: Model) -> None:
    turn(model, "mlp.experts", LimitedExperts)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, family="qwen3_moe")
