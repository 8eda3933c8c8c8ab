"""The shared expert is not added.

Met when a routed layer is replaced by a fused kernel that knows of routed experts only.
"""

import torch
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "experts/formula"


class RoutedOnly(DeepseekV3MoE):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        _, weights, chosen = self.gate(hidden_states)
        rows = hidden_states.view(-1, hidden_states.shape[-1])
        return self.experts(rows, chosen, weights).view(hidden_states.shape)


def plant(model: Model) -> None:
    turn(model, r"layers\.1\.mlp", RoutedOnly)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, family="deepseek_v3")
