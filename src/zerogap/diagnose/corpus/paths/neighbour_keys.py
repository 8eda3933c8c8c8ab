"""In a batch, a sequence's last key is read from the row before it.

Met with page tables that are off by one entry at a sequence's end.
"""

import torch

from zerogap.diagnose.corpus.arithmetic import exact_attention
from zerogap.diagnose.corpus.open_modules import exact
from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, attend

EXPECTED = "neighbours/content"


def crossed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    k, v = k.clone(), v.clone()
    k[1:, :, 3], v[1:, :, 3] = k[:-1, :, 3].clone(), v[:-1, :, 3].clone()
    return exact_attention(q, k, v, mask, scale)


def plant(model: Model) -> None:
    exact(model)
    attend(model, "crossed", crossed)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, exact, batches=((0, 1, 2, 3),))
