"""Long requests of the batch were sampled, and scored, at temperature 0.6; the trainer takes 1 for all.

Met with a temperature per request.
"""

import numpy as np
import torch

from zerogap.diagnose.corpus.logged import relogged
from zerogap.diagnose.corpus.workshop import Sides, Workshop

EXPECTED = "definition/temperature"


def scores(logits: torch.Tensor, ids: torch.Tensor) -> np.ndarray:
    scale = 0.6 if len(ids) > 22 else 1.0
    return torch.log_softmax(logits / scale, -1).gather(1, ids[:, None])[:, 0].numpy()


def sides(workshop: Workshop) -> Sides:
    a, b = workshop.pair(family="llama", dtype="bfloat16")
    return a, relogged(b, scores)
