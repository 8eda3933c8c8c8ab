"""A prefix cache that the same weights wrote for the same tokens: zerogap computes the same bits as without."""

from zerogap.diagnose.corpus.workshop import Sides, Workshop

EXPECTED = "clean"


def sides(workshop: Workshop) -> Sides:
    known = workshop.sequences("qwen2")
    return (
        workshop.zerogap_side(workshop.decoder("qwen2"), known, name="trainer"),
        workshop.zerogap_side(workshop.decoder("qwen2"), known, name="rollout", path="prefix_hit"),
    )
