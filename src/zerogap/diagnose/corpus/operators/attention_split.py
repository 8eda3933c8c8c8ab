"""Keys are split in two spans whose results are merged (flash-decoding), against one span.

Met between prefill and decode kernels; here both compute whole sequences.
"""

import functools

from zerogap.diagnose.corpus.arithmetic import online
from zerogap.diagnose.corpus.workshop import Sides, Workshop, attend

EXPECTED = "attention/split"


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(
        lambda model: attend(model, "spans_2", functools.partial(online, block=64, parts=2)),
        lambda model: attend(model, "block_64", functools.partial(online, block=64)),
    )
