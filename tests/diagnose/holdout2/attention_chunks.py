"""Keys of earlier chunks of 16 tokens are not visible: chunked local attention where all keys should be seen.

Met with models that mix local and global layers, when a stack takes all layers for local.
"""

from typing import Any

import torch

from zerogap.diagnose.corpus.arithmetic import eager
from zerogap.diagnose.corpus.workshop import Sides, Workshop, attend

EXPECTED = "attention/mask"


def local(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scale: float) -> torch.Tensor:
    rows, keys = torch.arange(query.shape[2]) + key.shape[2] - query.shape[2], torch.arange(key.shape[2])
    apart = rows[:, None] // 16 != keys[None] // 16
    return eager(query, key, value, mask.masked_fill(apart, torch.finfo(mask.dtype).min), scale)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(
        lambda model: attend(model, "local", local),
        family="qwen3",
    )
