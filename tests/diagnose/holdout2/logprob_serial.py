"""The exponentials of a row are added one by one over the vocabulary, against 64 lanes and a tree.

Met between a one-pass kernel and a block-wide reduction.
"""

import numpy as np
import torch

from zerogap.diagnose.corpus.arithmetic import chain, halving
from zerogap.diagnose.corpus.logged import relogged
from zerogap.diagnose.corpus.workshop import Sides, Workshop

EXPECTED = "logprob/order"


def normalised(logits: torch.Tensor, ids: torch.Tensor, lanes: int) -> np.ndarray:
    top = logits.amax(-1, keepdim=True)
    terms = torch.exp(logits - top)
    total = halving(torch.stack([chain(terms[:, lane::lanes].unbind(-1)) for lane in range(lanes)], -1))
    return (logits.gather(1, ids[:, None])[:, 0] - top[:, 0] - torch.log(total)).numpy()


def scores(logits: torch.Tensor, ids: torch.Tensor) -> np.ndarray:
    return normalised(logits, ids, 1)


def lanes(logits: torch.Tensor, ids: torch.Tensor) -> np.ndarray:
    return normalised(logits, ids, 64)


def sides(workshop: Workshop) -> Sides:
    a, b = workshop.pair(family="llama", dtype="float32")
    return relogged(a, lanes), relogged(b, scores)
