"""A sliding window of 8 keys in one stack is one of 9 in the other.

huggingface/transformers#39408, vllm-project/vllm#3385: flash attention's `window_size` leaves the query itself out.
"""

import torch

from zerogap.diagnose.corpus.arithmetic import eager
from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, attend

EXPECTED = "attention/mask"


def windowed(keys: int) -> torch.Tensor:
    """Zero where a query sees a key, else a large negative number: [64, 64]."""
    distance = torch.arange(64)[:, None] - torch.arange(64)
    return torch.where(distance < keys, 0.0, -1e9)


def within(keys: int, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """The mask with a window of that many keys, the query's own among them."""
    size, rows = key.shape[2], query.shape[2]
    window = windowed(keys)[size - rows : size, :size].to(query.dtype)
    return window.expand(len(query), 1, -1, -1) if mask is None else torch.minimum(mask, window)


def exclusive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, s: float) -> torch.Tensor:
    return eager(q, k, v, within(8, q, k, mask), s)


def inclusive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, s: float) -> torch.Tensor:
    return eager(q, k, v, within(9, q, k, mask), s)


def plant(model: Model) -> None:
    attend(model, "holdout3_window_inclusive", inclusive)


def usual(model: Model) -> None:
    attend(model, "holdout3_window_exclusive", exclusive)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, usual, family="qwen2")
