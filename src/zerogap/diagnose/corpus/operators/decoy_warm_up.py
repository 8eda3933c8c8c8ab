"""A fused norm, and a first capture that disagrees with every later one: the second is a decoy.

Met with autotuned kernels: whoever compares first captures blames the layer that was tuned last.
"""

import dataclasses

from zerogap.diagnose.corpus.operators.norm_weight_rounding import plant
from zerogap.diagnose.corpus.workshop import Sides, Workshop, retold

EXPECTED = "norm/rounding"


def sides(workshop: Workshop) -> Sides:
    a, b = workshop.pair(plant)
    first = b.trace.recorded
    warm = dataclasses.replace(first, boundaries={**first.boundaries, "embed": first.boundaries["embed"] * 1.01})
    return a, retold(b, passes=(warm,))
