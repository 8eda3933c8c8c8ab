"""FP8 keys and values that were written with the scales of one step are read with those of the next.

Met when KV scales are recalibrated at a weight sync and the cache survives; the sets' names were recorded.
"""

import dataclasses
import functools
from typing import Any

import torch

from zerogap.diagnose.corpus.arithmetic import e4m3, eager
from zerogap.diagnose.corpus.workshop import Sides, Workshop, attend, retold

EXPECTED = "cache/scales"


OLD, NEW = 0.020, 0.023


def cached(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scale: float, read: float) -> Any:
    key, value = ((e4m3(x / OLD) * read).to(x.dtype) for x in (key, value))
    return eager(query, key, value, mask, scale)


def sides(workshop: Workshop) -> Sides:
    trainer, engine = workshop.pair(
        lambda model: attend(model, "read_new", functools.partial(cached, read=NEW)),
        lambda model: attend(model, "read_old", functools.partial(cached, read=OLD)),
    )
    old, new = (
        tuple(dataclasses.replace(s, scale_set=f"step {step}") for s in trainer.trace.sequences) for step in (40, 41)
    )
    return retold(trainer, sequences=old), retold(engine, sequences=new)
