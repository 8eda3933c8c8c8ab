"""A routed model in zerogap: whole sequences packed together against chunks."""

from zerogap.diagnose.corpus.workshop import Sides, Workshop

EXPECTED = "clean"


def sides(workshop: Workshop) -> Sides:
    sequences = workshop.sequences("qwen3_moe")
    a, b = workshop.decoder("qwen3_moe"), workshop.decoder("qwen3_moe")
    return (
        workshop.zerogap_side(a, sequences, name="trainer", batches=((0, 1, 2, 3),)),
        workshop.zerogap_side(b, sequences, name="rollout", path="chunked"),
    )
