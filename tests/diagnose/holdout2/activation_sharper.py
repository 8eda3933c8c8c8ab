"""The gate is x sigmoid(1.702 x), the quick approximation of GELU, instead of SiLU.

Met when a kernel written for models with that constant serves another model.
"""

import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "activation/formula"


class SharpMLP(Qwen3MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate_proj(x)
        return self.down_proj((gate * torch.sigmoid(1.702 * gate.float())).to(x.dtype) * self.up_proj(x))


def plant(model: Model) -> None:
    turn(model, r"mlp", SharpMLP)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, family="qwen3")
