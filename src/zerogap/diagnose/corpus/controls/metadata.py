"""Versions, settings, layout flags and names differ; what was computed does not."""

from zerogap.diagnose.corpus.workshop import Sides, Workshop, retold

EXPECTED = "clean"


def sides(workshop: Workshop) -> Sides:
    a, b = workshop.pair()
    return a, retold(
        b,
        name="engine 0.32, warm",
        settings={"seed": 17, "max_tokens": 24, "stop": ["</s>"], "logprobs": 1},
        versions={**b.trace.versions, "torch": "2.11.0", "engine": "0.32.0"},
        layout={**b.trace.layout, "tensor_parallel_size": 2, "enforce_eager": True, "block_size": 32},
        source="/somewhere/else",
    )
