"""Padding on the left against padding on the right, in a stack whose rows do not depend on it."""

from zerogap.diagnose.corpus.open_modules import exact
from zerogap.diagnose.corpus.workshop import Sides, Workshop

EXPECTED = "clean"


def sides(workshop: Workshop) -> Sides:
    a, b = workshop.model(), workshop.model()
    exact(a)
    exact(b)
    batch = ((0, 1, 2, 3),)
    return (
        workshop.torch_side(a, name="trainer", batches=batch),
        workshop.torch_side(b, name="rollout", batches=batch, padding="left"),
    )
