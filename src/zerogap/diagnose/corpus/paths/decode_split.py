"""A row decoded alone splits its keys in two spans (flash-decoding); a row of a full pass does not.

Met in every engine with a decode kernel of its own.
"""

import torch

from zerogap.diagnose.corpus.arithmetic import exact_attention
from zerogap.diagnose.corpus.open_modules import exact
from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, attend

EXPECTED = "attention/split"


def split(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    return exact_attention(q, k, v, mask, scale, parts=2 if q.shape[2] == 1 else 1)


def plant(model: Model) -> None:
    exact(model)
    attend(model, "decode_split", split)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, exact, path="decode")
