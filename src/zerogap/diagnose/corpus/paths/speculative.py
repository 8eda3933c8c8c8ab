"""Log-probs of accepted draft tokens are the draft model's for every third token. Recorded with and without.

Met with speculative decoding that records what the drafter said.
"""

import dataclasses

import numpy as np

from zerogap.diagnose.corpus.workshop import Sides, Workshop
from zerogap.diagnose.side import RecordedSide

EXPECTED = "path/speculative"


def sides(workshop: Workshop) -> Sides:
    a, b = workshop.pair()
    plain = dataclasses.replace(b.trace.recorded, boundaries={}, path="decode")
    noise = np.random.default_rng(9)
    drafted = []
    for logprobs in plain.logprobs:
        guess = logprobs + noise.normal(0, 0.3, len(logprobs))
        drafted.append(np.where(np.arange(len(logprobs)) % 3 == 0, guess, logprobs).astype(np.float32))
    answer = dataclasses.replace(plain, path="speculative", logprobs=tuple(drafted))
    return a, RecordedSide(dataclasses.replace(b.trace, passes=(answer, plain)))
