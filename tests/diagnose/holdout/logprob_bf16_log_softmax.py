"""The trainer's log-softmax runs and is stored in BF16 (no upcast of the logits), the rollout's in FP32."""

import torch

from zerogap.diagnose.corpus.logged import relogged
from zerogap.diagnose.corpus.workshop import Workshop

EXPECTED = "logprob/rounding"


def narrow(logits, ids):
    return torch.log_softmax(logits, -1).bfloat16().float().gather(1, ids[:, None])[:, 0].numpy()


def sides(workshop: Workshop):
    a, b = workshop.pair()
    return a, relogged(b, narrow)
