"""The engine hands log-probs over in BF16.

OpenRLHF/OpenRLHF#634, THUDM/slime#892: the log-softmax of BF16 logits is BF16 unless they are cast first.
"""

import numpy as np
import torch

from zerogap.diagnose.corpus.logged import relogged
from zerogap.diagnose.corpus.workshop import Sides, Workshop

EXPECTED = "logprob/rounding"


def rounded(logits: torch.Tensor, ids: torch.Tensor) -> np.ndarray:
    scores = torch.log_softmax(logits, -1).to(torch.bfloat16)
    return scores.gather(1, ids[:, None])[:, 0].float().numpy()


def sides(workshop: Workshop) -> Sides:
    trainer, rollout = workshop.pair(family="qwen3")
    return trainer, relogged(rollout, rounded)
