"""zerogap's trainer against its engine decoding in a batch, other order included."""

from zerogap.diagnose.corpus.workshop import Sides, Workshop

EXPECTED = "clean"


def sides(workshop: Workshop) -> Sides:
    rollout = workshop.zerogap_side(workshop.decoder(), name="rollout", path="decode", batches=((2, 0), (3, 1)))
    return workshop.zerogap_side(workshop.decoder(), name="trainer"), rollout
