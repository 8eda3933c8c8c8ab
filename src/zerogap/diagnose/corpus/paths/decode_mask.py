"""A row decoded alone does not see its own key: attention reads the cache before it was written.

Met with races between the kernel that writes the cache and the one that reads it.
"""

import torch

from zerogap.diagnose.corpus.arithmetic import exact_attention
from zerogap.diagnose.corpus.open_modules import exact
from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, attend

EXPECTED = "attention/mask"


def early(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    if q.shape[2] > 1 or k.shape[2] == 1:
        return exact_attention(q, k, v, mask, scale)
    seen = None if mask is None else mask[..., :-1]
    return exact_attention(q, k[:, :, :-1], v[:, :, :-1], seen, scale)


def plant(model: Model) -> None:
    exact(model)
    attend(model, "decode_mask", early)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, exact, path="decode")
