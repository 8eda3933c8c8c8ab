"""Log-probs went through a text answer with four decimals.

Met when an HTTP server formats numbers for people.
"""

import numpy as np
import torch

from zerogap.diagnose.corpus.logged import relogged
from zerogap.diagnose.corpus.workshop import Sides, Workshop

EXPECTED = "logprob/rounding"


def scores(logits: torch.Tensor, ids: torch.Tensor) -> np.ndarray:
    values = torch.log_softmax(logits, -1).gather(1, ids[:, None])[:, 0]
    return np.round(values.double().numpy(), 4)


def sides(workshop: Workshop) -> Sides:
    a, b = workshop.pair(family="llama", dtype="bfloat16")
    return a, relogged(b, scores)
