"""One side takes log(softmax(logits) + 1e-4), which bounds unlikely tokens from below."""

import torch

from zerogap.diagnose.corpus.logged import relogged
from zerogap.diagnose.corpus.workshop import Workshop

EXPECTED = "logprob/formula"


def guarded(logits, ids):
    return torch.log(torch.softmax(logits, -1) + 1e-4).gather(1, ids[:, None])[:, 0].numpy()


def sides(workshop: Workshop):
    a, b = workshop.pair()
    return a, relogged(b, guarded)
