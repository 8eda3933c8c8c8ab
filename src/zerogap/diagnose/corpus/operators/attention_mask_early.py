"""The causal mask is off by one: a row does not see itself (row 0 does).

Met in kernels that compare with < where <= is meant.
"""

import torch

from zerogap.diagnose.corpus.arithmetic import eager
from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, attend

EXPECTED = "attention/mask"


def early(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    first = k.shape[2] - q.shape[2]
    rows = torch.arange(first, k.shape[2])[:, None]
    own = (torch.arange(k.shape[2])[None] == rows) & (rows > 0)
    return eager(q, k, v, mask.masked_fill(own, torch.finfo(mask.dtype).min), scale)


def plant(model: Model) -> None:
    attend(model, "mask_early", early)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant)
