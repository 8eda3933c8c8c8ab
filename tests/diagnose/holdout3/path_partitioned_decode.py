"""Decoding cuts the keys into three parts that are merged, the full pass does not.

Flash decoding and paged attention v2 choose the number of splits for one query at a time; vLLM's batch-invariant mode
sets it to one. Met by everyone who scores with prefill what was sampled by decoding.
"""

import torch

from zerogap.diagnose.corpus.arithmetic import online
from zerogap.diagnose.corpus.open_modules import exact
from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, attend

EXPECTED = ("attention/split", "path/decode")  # what the decoding kernel does, and where it does it


def partitioned(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    return online(query, key, value, mask, scale, block=64, parts=3 if query.shape[2] == 1 else 1)


def plant(model: Model) -> None:
    exact(model)
    attend(model, "holdout3_partitioned", partitioned)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, plant, path="decode")
