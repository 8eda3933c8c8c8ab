"""Rows computed after a prefix hit differ; all else agrees. Recorded: the answer with hits, and one without.

Met with a prefix cache whose last page is shared and written by two sequences.
"""

import dataclasses

import numpy as np

from zerogap.diagnose.corpus.workshop import Sides, Workshop
from zerogap.diagnose.side import RecordedSide

EXPECTED = "path/prefix_hit"


def sides(workshop: Workshop) -> Sides:
    a, b = workshop.pair()
    whole = dataclasses.replace(b.trace.recorded, boundaries={})
    sequences = tuple(dataclasses.replace(s, hit_length=s.prompt_length - 1) for s in b.trace.sequences)
    noise = np.random.default_rng(8)
    hit = [p + np.where(s.counted, noise.normal(0, 0.02, len(p)), 0) for p, s in zip(whole.logprobs, sequences)]
    answer = dataclasses.replace(whole, path="prefix_hit", logprobs=tuple(p.astype(np.float32) for p in hit))
    return a, RecordedSide(dataclasses.replace(b.trace, sequences=sequences, passes=(answer, whole)))
