"""Two recorded traces with the same log-probs, one with boundaries and weights, one with nothing but the numbers."""

import dataclasses

from zerogap.diagnose.corpus.workshop import Sides, Workshop
from zerogap.diagnose.side import RecordedSide

EXPECTED = "clean"


def sides(workshop: Workshop) -> Sides:
    a, b = workshop.pair()
    bare = dataclasses.replace(b.trace.recorded, boundaries={}, meaning={})
    trace = dataclasses.replace(b.trace, passes=(bare,), weights={}, buffers={}, versions={}, layout={}, model={})
    return RecordedSide(a.trace), RecordedSide(trace)
