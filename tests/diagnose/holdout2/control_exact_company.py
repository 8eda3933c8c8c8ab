"""A harmless difference: one side computes all sequences in one pass, the other two by two; no row feels it.

Met with batch-invariant kernels, which must not be blamed for their batches.
"""

from zerogap.diagnose.corpus.open_modules import exact
from zerogap.diagnose.corpus.workshop import Sides, Workshop

EXPECTED = "clean"


def sides(workshop: Workshop) -> Sides:
    a, b = workshop.model(), workshop.model()
    exact(a)
    exact(b)
    return (
        workshop.torch_side(a, name="trainer", batches=((3, 0), (2, 1))),
        workshop.torch_side(b, name="engine", batches=((0, 1, 2, 3),)),
    )
