"""After an update the prefix cache still holds keys and values of the old weights; three prompts hit it.

Met when `update_weights` does not drop the cache. The recording says which version each token's cache was made with.
"""

import dataclasses

import numpy as np

from zerogap.diagnose.corpus.cached import continued
from zerogap.diagnose.corpus.open_modules import exact
from zerogap.diagnose.corpus.state.stale_tensor import train
from zerogap.diagnose.corpus.workshop import EditedSide, Sides, Workshop

EXPECTED = "cache/stale_weights"


def sides(workshop: Workshop) -> Sides:
    def trained(model: object) -> None:
        exact(model)
        train(model)

    a, b = workshop.pair(trained, trained)
    old, new = workshop.model(), workshop.model()
    exact(old)
    trained(new)
    sequences, logprobs = [], []
    for sequence, whole in zip(b.trace.sequences, b.trace.recorded.logprobs, strict=True):
        hit = sequence.prompt_length - 1
        versions = np.where(np.arange(len(sequence.ids)) < hit, 3, 4)
        sequences.append(dataclasses.replace(sequence, hit_length=hit, versions=versions))
        found = continued(new, sequence, hit, writer=old)
        logprobs.append(np.where(np.isnan(found), whole, found))
    recorded = dataclasses.replace(b.trace.recorded, logprobs=tuple(logprobs), path="prefix_hit", boundaries={})
    trace = dataclasses.replace(b.trace, sequences=tuple(sequences), passes=(recorded,))
    return a, EditedSide(b, trace, lambda found: found)
