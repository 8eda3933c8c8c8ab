"""Query heads are given to key/value heads in turn (0, 1, 0, 1) instead of in groups (0, 0, 1, 1).

Met where `repeat` was used for `repeat_interleave`.
"""

import torch

from zerogap.diagnose.corpus.arithmetic import eager
from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, attend

EXPECTED = "attention/formula"


def in_turn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    times = q.shape[1] // k.shape[1]
    return eager(q, k.repeat(1, times, 1, 1), v.repeat(1, times, 1, 1), mask, scale)


def plant(model: Model) -> None:
    attend(model, "heads", in_turn)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant)
