"""Queries, keys and values of an FP32 model are cast to BF16 for attention, as 16-bit flash kernels need.

Met when a trainer keeps FP32 and asks for flash attention.
"""

import functools
from typing import Any

import torch

from zerogap.diagnose.corpus.arithmetic import online
from zerogap.diagnose.corpus.workshop import Sides, Workshop, attend

EXPECTED = "attention/operands"


def cast(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scale: float) -> torch.Tensor:
    q, k, v = (x.bfloat16().float() for x in (query, key, value))
    return online(q, k, v, mask, scale, block=64)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(
        lambda model: attend(model, "cast", cast),
        lambda model: attend(model, "uncast", functools.partial(online, block=64)),
        dtype="float32",
    )
