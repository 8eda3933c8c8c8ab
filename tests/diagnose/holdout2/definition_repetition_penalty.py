"""The engine's log-probs are those after a repetition penalty of 1.3 that it took from the model's folder.

Met with `generation_config.json`, whose sampling defaults an engine follows unasked.
"""

import numpy as np
import torch

from zerogap.diagnose.corpus.logged import relogged
from zerogap.diagnose.corpus.workshop import Sides, Workshop

EXPECTED = "definition/processed"


def scores(logits: torch.Tensor, ids: torch.Tensor) -> np.ndarray:
    logits = logits.clone()
    for row in range(1, len(logits)):
        seen = ids[:row].unique()
        values = logits[row, seen]
        logits[row, seen] = torch.where(values > 0, values / 1.3, values * 1.3)
    return torch.log_softmax(logits, -1).gather(1, ids[:, None])[:, 0].numpy()


def sides(workshop: Workshop) -> Sides:
    a, b = workshop.pair(family="qwen3", dtype="bfloat16")
    return a, relogged(b, scores)
