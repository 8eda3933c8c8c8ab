"""The weighted sum is multiplied by the reciprocal of the softmax's sum instead of divided by it.

Met between flash kernels, some of which invert the row sum once.
"""

from typing import Any

import torch

from zerogap.diagnose.corpus.arithmetic import grouped
from zerogap.diagnose.corpus.workshop import Sides, Workshop, attend

EXPECTED = "attention/primitive"


def inverted(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scale: float) -> torch.Tensor:
    key, value = grouped(key, query), grouped(value, query)
    scores = torch.matmul(query, key.transpose(2, 3)) * scale + mask
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    out = torch.matmul(weights, value) * (1.0 / weights.sum(-1, keepdim=True))
    return out.transpose(1, 2).contiguous()


def divided(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scale: float) -> torch.Tensor:
    key, value = grouped(key, query), grouped(value, query)
    scores = torch.matmul(query, key.transpose(2, 3)) * scale + mask
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    out = torch.matmul(weights, value) / weights.sum(-1, keepdim=True)
    return out.transpose(1, 2).contiguous()


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(
        lambda model: attend(model, "inverted", inverted),
        lambda model: attend(model, "divided", divided),
        dtype="float32",
    )
