"""Queries, keys and values are clipped to +-1 after their projection.

Met with configs that have `clip_qkv`, read by one of two stacks.
"""

import torch

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "linear/formula"


class Clipped(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:

        return super().forward(x).clamp(-1.0, 1.0)


def plant(model: Model) -> None:
    turn(model, r"q_proj|k_proj|v_proj", Clipped)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(
        plant,
    )
