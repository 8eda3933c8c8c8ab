"""Every third token's log-prob is the draft model's, which accepted it. Recorded with drafting and without.

Met with speculative decoding that records what the drafter said; the drafter here is the model's first layer.
"""

import dataclasses

import numpy as np

from zerogap.diagnose.corpus.workshop import Sides, Workshop
from zerogap.diagnose.side import RecordedSide

EXPECTED = "path/speculative"


def sides(workshop: Workshop) -> Sides:
    a, b = workshop.pair()
    drafter = workshop.model()
    drafter.model.layers = drafter.model.layers[:1]
    drafter.config.num_hidden_layers = 1
    plain = dataclasses.replace(b.trace.recorded, boundaries={})
    pairs = zip(plain.logprobs, workshop.torch_side(drafter).trace.recorded.logprobs, strict=True)
    drafted = tuple(np.where(np.arange(len(own)) % 3 == 0, guess, own) for own, guess in pairs)
    answer = dataclasses.replace(plain, path="speculative", logprobs=drafted)
    return a, RecordedSide(dataclasses.replace(b.trace, passes=(answer, plain)))
