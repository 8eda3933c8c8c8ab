"""All tensors of the rollout are one update behind.

Met when a synchronisation is skipped; every tensor differs by a little.
"""

from zerogap.diagnose.corpus.state.stale_tensor import train
from zerogap.diagnose.corpus.workshop import Sides, Workshop

EXPECTED = "weights/stale"


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(None, train)
