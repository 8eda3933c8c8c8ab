"""The prefix cache hands out another prompt's pages: its key leaves out what makes the two prompts different.

Met with hash collisions, and with keys that forget an adapter or an image.
"""

import dataclasses

import numpy as np

from zerogap.diagnose.corpus.cached import continued
from zerogap.diagnose.corpus.open_modules import exact
from zerogap.diagnose.corpus.workshop import EditedSide, Sides, Workshop

EXPECTED = "cache/wrong_prefix"


def sides(workshop: Workshop) -> Sides:
    a, b = workshop.pair(exact, exact)
    model = workshop.model()
    exact(model)
    sequences, logprobs = list(b.trace.sequences), list(b.trace.recorded.logprobs)
    for i, other in ((1, 3), (3, 1)):  # two prompts of nine tokens and more find each other's first eight
        found = continued(model, sequences[i], 8, written=sequences[other].ids)
        logprobs[i] = np.where(np.isnan(found), logprobs[i], found)
        sequences[i] = dataclasses.replace(sequences[i], hit_length=8)
    for i in (0, 2):
        sequences[i] = dataclasses.replace(sequences[i], hit_length=0)
    recorded = dataclasses.replace(b.trace.recorded, logprobs=tuple(logprobs), path="prefix_hit", boundaries={})
    trace = dataclasses.replace(b.trace, sequences=tuple(sequences), passes=(recorded,))
    return a, EditedSide(b, trace, lambda found: found)
