"""Both sides sample at temperature 1 without filters; one says "raw" and names no filter, the other "processed"."""

from zerogap.diagnose.corpus.workshop import Sides, Workshop
from zerogap.diagnose.trace import Definition

EXPECTED = "clean"


def sides(workshop: Workshop) -> Sides:
    other = Definition(1.0, False, top_k=0, top_p=1.0, min_p=0.0)
    return workshop.pair(definition=other)
