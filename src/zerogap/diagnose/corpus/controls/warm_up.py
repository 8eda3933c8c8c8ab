"""The first capture of one side holds other rows than every later one: it was made while kernels were being tuned.

Its log-probs are those of the later runs; only the boundaries of one layer are not.
"""

import dataclasses

from zerogap.diagnose.corpus.workshop import Sides, Workshop, retold

EXPECTED = "clean"


def sides(workshop: Workshop) -> Sides:
    a, b = workshop.pair()
    first = b.trace.recorded
    changed = {
        "0.gate_proj": first.boundaries["0.gate_proj"] * 1.01,
        "0.activation": first.boundaries["0.activation"] + 1,
    }
    warm = dataclasses.replace(first, boundaries={**first.boundaries, **changed})
    return a, retold(b, passes=(warm,))
