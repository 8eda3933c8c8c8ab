"""Control: a stack whose rows depend on nothing but their own sequence, one by one against batched and padded left."""

from zerogap.diagnose.corpus.open_modules import exact
from zerogap.diagnose.corpus.workshop import Workshop

EXPECTED = "clean"


def sides(workshop: Workshop):
    return workshop.pair(exact, exact, batches=((2, 0), (3, 1)), padding="left")
