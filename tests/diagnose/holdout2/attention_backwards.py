"""Key blocks are visited from the last to the first, as FlashAttention 3 does, against the first to the last.

Met between two flash kernels.
"""

import functools
import math
from typing import Any

import torch

from zerogap.diagnose.corpus.arithmetic import grouped, online
from zerogap.diagnose.corpus.workshop import Sides, Workshop, attend

EXPECTED = "attention/order"


def backwards(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scale: float) -> torch.Tensor:
    seen = torch.zeros(()) if mask is None else mask
    size = 8
    key, value = grouped(key, query), grouped(value, query)
    top = torch.full((*query.shape[:3], 1), -1e30)
    total, out = torch.zeros_like(top), torch.zeros_like(query)
    for start in reversed(range(0, key.shape[2], size)):
        cut = slice(start, start + size)
        hidden = seen[..., cut] < -1e4
        scores = (torch.matmul(query, key[:, :, cut].transpose(2, 3)) * scale).masked_fill(hidden, -math.inf)
        peak = torch.maximum(top, scores.amax(-1, keepdim=True))
        alpha, weights = torch.exp(top - peak), torch.exp(scores - peak)
        total = total * alpha + weights.sum(-1, keepdim=True)
        out = out * alpha + torch.matmul(weights, value[:, :, cut])
        top = peak
    return (out / total).transpose(1, 2).contiguous()


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(
        lambda model: attend(model, "backwards", backwards),
        lambda model: attend(model, "forwards", functools.partial(online, block=8)),
        dtype="float32",
    )
