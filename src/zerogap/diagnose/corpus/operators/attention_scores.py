"""Scores stay FP32 up to the softmax; the eager model rounds them to BF16 twice.

Met between the eager model and any fused attention.
"""

import functools

from zerogap.diagnose.corpus.arithmetic import eager
from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, attend

EXPECTED = "attention/rounding"


def plant(model: Model) -> None:
    attend(model, "scores", functools.partial(eager, wide=True))


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant)
