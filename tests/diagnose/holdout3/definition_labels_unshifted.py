"""The trainer's log-probs stand one place too early: entry i is that of token i+1.

PrimeIntellect-ai/prime-rl#1525: labels are shifted for the loss, and the log-probs are not shifted back.
"""

import numpy as np

from zerogap.diagnose.corpus.workshop import Sides, Workshop, edited
from zerogap.diagnose.trace import SequenceTrace

EXPECTED = "definition/shift"


def early(logprobs: np.ndarray, _sequence: SequenceTrace) -> np.ndarray:
    return np.append(logprobs[1:], np.float32(0.0))


def sides(workshop: Workshop) -> Sides:
    trainer, rollout = workshop.pair(family="qwen3", dtype="float32")
    return edited(trainer, early), rollout
