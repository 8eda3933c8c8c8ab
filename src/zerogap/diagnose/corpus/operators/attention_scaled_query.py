"""Queries are multiplied by the scale, and rounded, before the scores; the other side scales the scores.

Met between eager models and kernels that fold the scale into the query.
"""

import torch

from zerogap.diagnose.corpus.arithmetic import eager
from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, attend

# Where the scale is applied, and with it where its product is rounded: one fact, two names.
EXPECTED = ("attention/scale", "attention/rounding")


def scaled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    return eager(q * scale, k, v, mask, 1.0)


def plant(model: Model) -> None:
    attend(model, "scaled_query", scaled)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant)
