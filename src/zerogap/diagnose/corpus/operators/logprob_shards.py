"""The normaliser is summed over four shards of the vocabulary and the shards' sums added (vocabulary parallel).

Met between one device and tensor parallelism; the logits are the same.
"""

import numpy as np
import torch

from zerogap.diagnose.corpus.logged import relogged
from zerogap.diagnose.corpus.workshop import Sides, Workshop

EXPECTED = "logprob/order"


def sharded(logits: torch.Tensor, ids: torch.Tensor) -> np.ndarray:
    top = logits.amax(-1, keepdim=True)
    total = sum(torch.exp(shard - top).sum(-1) for shard in logits.chunk(4, -1))
    picked = logits.gather(-1, ids[:, None])[:, 0]
    return ((picked - top[:, 0]) - torch.log(total)).numpy()  # type: ignore[arg-type]


def whole(logits: torch.Tensor, ids: torch.Tensor) -> np.ndarray:
    top = logits.amax(-1, keepdim=True)
    picked = logits.gather(-1, ids[:, None])[:, 0]
    return ((picked - top[:, 0]) - torch.log(torch.exp(logits - top).sum(-1))).numpy()


def sides(workshop: Workshop) -> Sides:
    a, b = workshop.pair()
    return relogged(a, whole), relogged(b, sharded)
