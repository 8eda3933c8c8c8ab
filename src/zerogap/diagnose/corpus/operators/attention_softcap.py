"""Scores are capped by 30 * tanh(scores / 30), which the model does not have.

Met when the attention parameters of Gemma 2 are left in a shared layer.
"""

import functools

from zerogap.diagnose.corpus.arithmetic import eager
from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, attend

EXPECTED = "attention/formula"


def plant(model: Model) -> None:
    attend(model, "softcap", functools.partial(eager, cap=30.0))


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant)
