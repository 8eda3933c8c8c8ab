"""Keys and values are read through E4M3 codes with a scale per token and head; the other side keeps them in BF16.

Met with `kv_cache_dtype=fp8` in the rollout alone.
"""

import torch

from zerogap.diagnose.corpus.arithmetic import eager, quantised
from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, attend

EXPECTED = "attention/operands"


def through_codes(x: torch.Tensor) -> torch.Tensor:
    return quantised(x.reshape(-1, x.shape[-1]), 1, 0).to(x.dtype).view(x.shape)


def coded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    return eager(q, through_codes(k), through_codes(v), mask, scale)


def plant(model: Model) -> None:
    attend(model, "coded", coded)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant)
