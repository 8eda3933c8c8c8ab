"""The sigmoid is computed as half of one plus tanh(x/2), as fast GPU kernels do, in FP32.

Met between a fast-math kernel and the library's exponential.
"""

import torch
from transformers.models.llama.modeling_llama import LlamaMLP

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "activation/primitive"


class TanhMLP(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate_proj(x)
        return self.down_proj(gate * (0.5 * (1.0 + torch.tanh(0.5 * gate))) * self.up_proj(x))


def plant(model: Model) -> None:
    turn(model, r"mlp", TanhMLP)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, dtype="float32")
