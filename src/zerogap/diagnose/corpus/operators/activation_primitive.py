"""SiLU as x / (1 + exp(-x)) instead of the library's own, in an FP32 model.

Met between kernels with different exponentials or a reciprocal in place of the division.
"""

import torch
from transformers.models.llama.modeling_llama import LlamaMLP

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "activation/primitive"


class ReciprocalMLP(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate_proj(x)
        return self.down_proj(gate * torch.reciprocal(1.0 + torch.exp(-gate)) * self.up_proj(x))


def plant(model: Model) -> None:
    turn(model, "mlp", ReciprocalMLP)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, dtype="float32")
