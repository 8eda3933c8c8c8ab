"""After a prefix hit positions start at zero again; the recording says so.

Met where position ids are made from the length of what is computed instead of where it stands.
"""

import dataclasses

import numpy as np

from zerogap.diagnose.corpus.cached import continued
from zerogap.diagnose.corpus.open_modules import exact
from zerogap.diagnose.corpus.workshop import EditedSide, Sides, Workshop

EXPECTED = "cache/positions"


def sides(workshop: Workshop) -> Sides:
    a, b = workshop.pair(exact, exact)
    model = workshop.model()
    exact(model)
    sequences, logprobs = [], []
    for sequence, whole in zip(b.trace.sequences, b.trace.recorded.logprobs, strict=True):
        hit, size = sequence.prompt_length - 1, len(sequence.ids)
        positions = np.concatenate([np.arange(hit), np.arange(size - hit)]).astype(np.int32)
        sequences.append(dataclasses.replace(sequence, hit_length=hit, positions=positions))
        found = continued(model, sequence, hit, first_position=0)
        logprobs.append(np.where(np.isnan(found), whole, found))
    recorded = dataclasses.replace(b.trace.recorded, logprobs=tuple(logprobs), path="prefix_hit", boundaries={})
    trace = dataclasses.replace(b.trace, sequences=tuple(sequences), passes=(recorded,))
    return a, EditedSide(b, trace, lambda found: found)
