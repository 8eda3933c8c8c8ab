"""The same batch in another order, and another batch size, in a stack whose rows do not depend on it."""

from zerogap.diagnose.corpus.open_modules import exact
from zerogap.diagnose.corpus.workshop import Sides, Workshop

EXPECTED = "clean"


def sides(workshop: Workshop) -> Sides:
    a, b = workshop.model(), workshop.model()
    exact(a)
    exact(b)
    return (
        workshop.torch_side(a, name="trainer", batches=((0, 1, 2, 3),)),
        workshop.torch_side(b, name="rollout", batches=((3, 1), (2, 0))),
    )
