"""SiLU is written as x times sigmoid(x) in BF16: the sigmoid is rounded before the product.

Met with activations spelled out in a model file instead of the library's SiLU.
"""

import torch
from transformers.models.llama.modeling_llama import LlamaMLP

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "activation/rounding"


class SpelledMLP(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate_proj(x)
        return self.down_proj(gate * torch.sigmoid(gate) * self.up_proj(x))


def plant(model: Model) -> None:
    turn(model, r"mlp", SpelledMLP)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(
        plant,
    )
