"""Logits are capped by 30 * tanh(logits / 30) on one side.

Met when `final_logit_softcapping` of Gemma 2 is applied to everything.
"""

import torch

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "head/formula"


class CappedHead(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().forward(x) / 30.0) * 30.0


def plant(model: Model) -> None:
    turn(model, "lm_head", CappedHead)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant)
