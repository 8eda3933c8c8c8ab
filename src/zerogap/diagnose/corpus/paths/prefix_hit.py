"""Rows computed after a prefix hit attend with another scale; all else agrees. Recorded: the answer with hits, and one
without; no boundaries, and nothing to ask again.

Met where the kernel for "some keys are cached already" takes its scale from another place than the one for prefill.
"""

import dataclasses

import numpy as np
import torch

from zerogap.diagnose.corpus.arithmetic import exact_attention
from zerogap.diagnose.corpus.cached import continued
from zerogap.diagnose.corpus.open_modules import exact
from zerogap.diagnose.corpus.workshop import Sides, Workshop, attend
from zerogap.diagnose.side import RecordedSide

EXPECTED = "path/prefix_hit"


def rescaled(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    return exact_attention(q, k, v, mask, scale * (0.9 if q.shape[2] < k.shape[2] else 1.0))


def sides(workshop: Workshop) -> Sides:
    a, b = workshop.pair(exact, exact)
    model = workshop.model()
    exact(model)
    attend(model, "rescaled", rescaled)
    whole = dataclasses.replace(b.trace.recorded, boundaries={})
    sequences, logprobs = [], []
    for sequence, values in zip(b.trace.sequences, whole.logprobs, strict=True):
        hit = sequence.prompt_length - 1
        sequences.append(dataclasses.replace(sequence, hit_length=hit))
        found = continued(model, sequence, hit)
        logprobs.append(np.where(np.isnan(found), values, found))
    answer = dataclasses.replace(whole, path="prefix_hit", logprobs=tuple(logprobs))
    return a, RecordedSide(dataclasses.replace(b.trace, sequences=tuple(sequences), passes=(answer, whole)))
