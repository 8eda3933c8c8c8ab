"""Padded columns on the left are attended to: the attention mask of the batch is not passed on.

Met with left padding and a model that was called without `attention_mask`.
"""

import torch

from zerogap.diagnose.corpus.arithmetic import exact_attention
from zerogap.diagnose.corpus.open_modules import exact
from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, attend

# A mask that forgets padding is both.
EXPECTED = ("neighbours/padding", "attention/mask")


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    rows = torch.arange(k.shape[2] - q.shape[2], k.shape[2])[:, None]
    hidden = torch.arange(k.shape[2])[None] > rows
    return exact_attention(q, k, v, torch.zeros(hidden.shape).masked_fill(hidden, -1e9)[None, None], scale)


def plant(model: Model) -> None:
    exact(model)
    attend(model, "causal_only", causal)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, exact, batches=((0, 1, 2, 3),), padding="left")
