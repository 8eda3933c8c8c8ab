"""The vocabulary was padded to a multiple of 128, and the logits of the added rows, all zero, are in the softmax.

Met in trainers that pad the vocabulary for their ranks and do not mask it.
"""

import numpy as np
import torch

from zerogap.diagnose.corpus.logged import relogged
from zerogap.diagnose.corpus.workshop import Sides, Workshop

EXPECTED = "logprob/formula"


def scores(logits: torch.Tensor, ids: torch.Tensor) -> np.ndarray:
    padded = torch.nn.functional.pad(logits, (0, 64))
    return torch.log_softmax(padded, -1).gather(1, ids[:, None])[:, 0].numpy()


def sides(workshop: Workshop) -> Sides:
    a, b = workshop.pair(family="llama", dtype="bfloat16")
    return a, relogged(b, scores)
