"""Control: zerogap's trainer pass against its own decoding, in company."""

from zerogap.diagnose.corpus.workshop import Workshop

EXPECTED = "clean"


def sides(workshop: Workshop):
    a = workshop.zerogap_side(workshop.decoder("qwen3"), workshop.sequences("qwen3"), name="trainer")
    b = workshop.zerogap_side(
        workshop.decoder("qwen3"), workshop.sequences("qwen3"), name="engine", path="decode", batches=((0, 1, 2, 3),)
    )
    return a, b
