"""Log-probs are stored in FP16 in the rollout buffer.

Met in loops that keep rollouts in half precision to save memory.
"""

import numpy as np
import torch

from zerogap.diagnose.corpus.logged import relogged
from zerogap.diagnose.corpus.workshop import Sides, Workshop

EXPECTED = "logprob/rounding"


def scores(logits: torch.Tensor, ids: torch.Tensor) -> np.ndarray:
    values = torch.log_softmax(logits, -1).gather(1, ids[:, None])[:, 0]
    return values.half().float().numpy()


def sides(workshop: Workshop) -> Sides:
    a, b = workshop.pair(family="qwen3", dtype="bfloat16")
    return a, relogged(b, scores)
