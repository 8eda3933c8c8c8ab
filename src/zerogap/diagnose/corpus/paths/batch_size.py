"""With more than one sequence in a batch attention splits keys in two spans; alone it does not.

Met with heuristics that choose the number of splits by how full the device is.
"""

import torch

from zerogap.diagnose.corpus.arithmetic import exact_attention
from zerogap.diagnose.corpus.open_modules import exact
from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, attend

# The rows depend on the batch's size because attention's split does.
EXPECTED = ("attention/split", "neighbours/batch_size")


def split(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    return exact_attention(q, k, v, mask, scale, parts=2 if len(q) > 1 else 1)


def plant(model: Model) -> None:
    exact(model)
    attend(model, "batch_size", split)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, exact, batches=((0, 1, 2, 3),))
