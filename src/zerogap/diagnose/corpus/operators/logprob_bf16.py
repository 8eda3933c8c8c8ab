"""log_softmax is computed and stored in BF16.

Met when logits stay in the model's dtype: the log-prob of a likely token loses all but two digits.
"""

import numpy as np
import torch

from zerogap.diagnose.corpus.logged import relogged
from zerogap.diagnose.corpus.workshop import Sides, Workshop

EXPECTED = "logprob/rounding"


def narrow(logits: torch.Tensor, ids: torch.Tensor) -> np.ndarray:
    return torch.log_softmax(logits.bfloat16(), -1).gather(-1, ids[:, None])[:, 0].float().numpy()


def sides(workshop: Workshop) -> Sides:
    a, b = workshop.pair()
    return a, relogged(b, narrow)
