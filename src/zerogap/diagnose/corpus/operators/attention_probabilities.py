"""Probabilities stay FP32 for the value product instead of being rounded to BF16.

Met between a kernel with FP32 P and all others.
"""

import functools

from zerogap.diagnose.corpus.arithmetic import online
from zerogap.diagnose.corpus.workshop import Sides, Workshop, attend

EXPECTED = "attention/rounding"


def sides(workshop: Workshop) -> Sides:
    wide = functools.partial(online, block=64, round_probabilities=False)
    return workshop.pair(
        lambda model: attend(model, "probabilities_wide", wide),
        lambda model: attend(model, "block_64", functools.partial(online, block=64)),
    )
