"""The trainer's vocabulary is padded to a multiple of 128, and the padded logits, zeros, join the softmax.

Met with Megatron's `--make-vocab-size-divisible-by`: 320 entries become 384, and the output layer returns them all.
"""

import numpy as np
import torch

from zerogap.diagnose.corpus.logged import relogged
from zerogap.diagnose.corpus.workshop import VOCABULARY, Sides, Workshop

EXPECTED = "logprob/formula"


def padded(logits: torch.Tensor, ids: torch.Tensor) -> np.ndarray:
    whole = torch.nn.functional.pad(logits, (0, -VOCABULARY % 128))
    return torch.log_softmax(whole, -1).gather(1, ids[:, None])[:, 0].numpy()


def sides(workshop: Workshop) -> Sides:
    trainer, rollout = workshop.pair()
    return relogged(trainer, padded), rollout
