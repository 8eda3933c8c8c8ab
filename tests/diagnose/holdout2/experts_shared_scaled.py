"""The shared expert is multiplied by the routed experts' factor of 2.5 as well.

Met when an engine fuses the shared expert into the routed ones and forgets to divide its weight.
"""

import torch
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = ("experts/scale", "experts/formula")


class ScaledShared(DeepseekV3MoE):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, weights, chosen = self.gate(x)
        routed = self.experts(x.view(-1, x.shape[-1]), chosen, weights).view(x.shape)
        return routed + self.shared_experts(x) * self.gate.routed_scaling_factor


def plant(model: Model) -> None:
    turn(model, r"layers\.1\.mlp", ScaledShared)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, family="deepseek_v3")
