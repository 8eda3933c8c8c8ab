"""A sliding window of 12 tokens in one layer, where the other side attends to everything.

Met with `sliding_window` in a config that also says `use_sliding_window: false`.
"""

import torch

from zerogap.diagnose.corpus.arithmetic import eager
from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, attend

EXPECTED = "attention/mask"
WINDOW = 12


def windowed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    rows = torch.arange(k.shape[2] - q.shape[2], k.shape[2])[:, None]
    far = torch.arange(k.shape[2])[None] <= rows - WINDOW
    return eager(q, k, v, mask.masked_fill(far, torch.finfo(mask.dtype).min), scale)


def plant(model: Model) -> None:
    attend(model, "window", windowed)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant)
