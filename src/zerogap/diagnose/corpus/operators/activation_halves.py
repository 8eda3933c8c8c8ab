"""The activation is applied to up instead of gate.

Met with fused gate-up products whose halves are taken in the other order than the weights were stacked.
"""

import torch
from transformers.models.llama.modeling_llama import LlamaMLP

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "activation/formula"


class TurnedMLP(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))


def plant(model: Model) -> None:
    turn(model, "layers.1.mlp", TurnedMLP)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant)
