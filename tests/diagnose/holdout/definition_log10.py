"""A service that returns base-10 logarithms."""

import math

from zerogap.diagnose.corpus.workshop import Workshop, edited

EXPECTED = "definition/unit"


def sides(workshop: Workshop):
    a, b = workshop.pair()
    return a, edited(b, lambda p, s: p / math.log(10.0))
