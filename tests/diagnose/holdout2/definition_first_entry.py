"""A drawn token outside the returned top 3 gets the log-prob of the first entry.

Met where an engine's list of alternatives is read by place instead of by id.
"""

import numpy as np
import torch

from zerogap.diagnose.corpus.logged import relogged
from zerogap.diagnose.corpus.workshop import Sides, Workshop

EXPECTED = "definition/wrong_token"


def scores(logits: torch.Tensor, ids: torch.Tensor) -> np.ndarray:
    table = torch.log_softmax(logits, -1)
    own = table.gather(1, ids[:, None])
    listed = (table >= table.topk(3).values[:, -1:]).gather(1, ids[:, None])
    return torch.where(listed, own, table.amax(-1, keepdim=True))[:, 0].numpy()


def sides(workshop: Workshop) -> Sides:
    a, b = workshop.pair(family="llama", dtype="bfloat16")
    return a, relogged(b, scores)
