"""Dropout of the MLP's output is on while the trainer scores.

Met with `model.train()` and recipes that leave dropout above zero.
"""

import torch
from transformers.models.llama.modeling_llama import LlamaMLP

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "rerun/nondeterministic"


class DroppingMLP(LlamaMLP):
    generator = torch.Generator().manual_seed(13)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        kept = torch.rand(out.shape, generator=self.generator) >= 0.05
        return (out * kept / 0.95).to(out.dtype)


def plant(model: Model) -> None:
    turn(model, r"layers\.1\.mlp", DroppingMLP)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant)
