"""Softmax over key blocks of 32 against blocks of 16: the running maximum, and so each probability's rounding, differs.

Met between two tunings of one flash kernel.
"""

import functools

from zerogap.diagnose.corpus.arithmetic import online
from zerogap.diagnose.corpus.workshop import Sides, Workshop, attend

EXPECTED = "attention/block"


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(
        lambda model: attend(model, "block_16", functools.partial(online, block=16)),
        lambda model: attend(model, "block_32", functools.partial(online, block=32)),
    )
