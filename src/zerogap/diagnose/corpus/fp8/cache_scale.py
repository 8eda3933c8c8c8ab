"""The FP8 cache has scale 1 because no calibrated one was found; the other side has a scale per token and head.

Met with vLLM's default KV scales for checkpoints without them.
"""

import torch

from zerogap.diagnose.corpus.arithmetic import e4m3, eager
from zerogap.diagnose.corpus.fp8.cache import coded
from zerogap.diagnose.corpus.workshop import Sides, Workshop, attend

EXPECTED = "attention/scale"


def unscaled(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    return eager(q, e4m3(k).to(k.dtype), e4m3(v).to(v.dtype), mask, scale)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(lambda model: attend(model, "unscaled", unscaled), lambda model: attend(model, "coded", coded))
