"""The log-sum-exp is computed with exp2 and log2 and constants, as Triton kernels do, in FP32.

Met between a fused log-prob kernel and the library's log-softmax.
"""

import numpy as np
import torch

from zerogap.diagnose.corpus.logged import relogged
from zerogap.diagnose.corpus.workshop import Sides, Workshop

EXPECTED = "logprob/primitive"


def scores(logits: torch.Tensor, ids: torch.Tensor) -> np.ndarray:
    top = logits.amax(-1, keepdim=True)
    total = torch.exp2((logits - top) * 1.4426950408889634).sum(-1)
    return (logits.gather(1, ids[:, None])[:, 0] - top[:, 0] - torch.log2(total) * 0.6931471805599453).numpy()


def plain(logits: torch.Tensor, ids: torch.Tensor) -> np.ndarray:
    top = logits.amax(-1, keepdim=True)
    total = torch.exp(logits - top).sum(-1)
    return (logits.gather(1, ids[:, None])[:, 0] - top[:, 0] - torch.log(total)).numpy()


def sides(workshop: Workshop) -> Sides:
    a, b = workshop.pair(family="llama", dtype="bfloat16")
    return relogged(a, plain), relogged(b, scores)
