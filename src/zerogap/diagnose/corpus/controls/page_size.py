"""Chunks of 32 tokens against chunks of 16, and pages of the engine's own: zerogap's results depend on neither."""

from zerogap.diagnose.corpus.workshop import Sides, Workshop

EXPECTED = "clean"


def sides(workshop: Workshop) -> Sides:
    return (
        workshop.zerogap_side(workshop.decoder(), name="trainer", path="chunked"),
        workshop.zerogap_side(workshop.decoder(), name="rollout", path="decode"),
    )
