"""The decode kernel keeps probabilities in FP32; the prefill kernel of the same engine rounds them to BF16.

Met with engines that have one attention kernel for one query and another for many. The trainer agrees with prefill.
"""

from typing import Any

import torch

from zerogap.diagnose.corpus.arithmetic import online
from zerogap.diagnose.corpus.open_modules import exact
from zerogap.diagnose.corpus.workshop import Sides, Workshop, attend, retold
from zerogap.diagnose.side import Ask

EXPECTED = "attention/rounding"


def two_kernels(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scale: float) -> torch.Tensor:
    narrow = query.shape[2] > 1
    return online(query, key, value, mask, scale, block=64, round_probabilities=narrow, dtype=torch.float64)


def sides(workshop: Workshop) -> Sides:
    a, b = workshop.model(), workshop.model()
    for model in (a, b):
        exact(model)
        attend(model, "two_kernels", two_kernels)
    engine = workshop.torch_side(b, name="engine")
    decoded = engine.again(Ask(path="decode", capture=True))
    assert decoded is not None, "a live side decodes"
    trainer = workshop.torch_side(a, name="trainer")
    return trainer, retold(engine, passes=(decoded,))
