"""In a packed row, every sample but the first has its log-probs one token early.

Met where labels are shifted over the whole row and cut into samples by the wrong lengths.
"""

import numpy as np

from zerogap.diagnose.corpus.workshop import Sides, Workshop, edited
from zerogap.diagnose.trace import SequenceTrace

EXPECTED = "definition/shift"


def change(logprobs: np.ndarray, sequence: SequenceTrace) -> np.ndarray:
    if len(sequence.ids) == 20:  # the first sample of the row
        return logprobs
    return np.concatenate([logprobs[1:], [np.nan]])


def sides(workshop: Workshop) -> Sides:
    a, b = workshop.pair(family="llama")
    return a, edited(b, change)
