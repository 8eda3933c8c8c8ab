"""A harmless difference: one side's numbers for prompt tokens are missing; only completions count.

Met with engines that return no log-probs of prompts.
"""

import numpy as np

from zerogap.diagnose.corpus.workshop import Sides, Workshop, edited
from zerogap.diagnose.trace import SequenceTrace

EXPECTED = "clean"


def change(logprobs: np.ndarray, sequence: SequenceTrace) -> np.ndarray:
    return np.where(sequence.counted, logprobs, np.nan)


def sides(workshop: Workshop) -> Sides:
    a, b = workshop.pair(family="qwen3_moe")
    return a, edited(b, change)
