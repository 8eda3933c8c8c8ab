"""The log-prob of the likeliest token is recorded instead of the drawn one's.

Met with OpenAI-style `top_logprobs`, where the first entry is taken.
"""

import numpy as np
import torch

from zerogap.diagnose.corpus.logged import relogged
from zerogap.diagnose.corpus.workshop import Sides, Workshop

EXPECTED = "definition/wrong_token"


def likeliest(logits: torch.Tensor, ids: torch.Tensor) -> np.ndarray:
    return torch.log_softmax(logits, -1).amax(-1).numpy()


def sides(workshop: Workshop) -> Sides:
    a, b = workshop.pair()
    return a, relogged(b, likeliest)
