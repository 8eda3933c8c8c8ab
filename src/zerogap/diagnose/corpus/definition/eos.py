"""The log-prob of the token that ends a completion is recorded as 0.

Met in engines that stop before they score the stop token, and pad the list to its length.
"""

import numpy as np

from zerogap.diagnose.corpus.workshop import EOS, Sides, Workshop, edited
from zerogap.diagnose.trace import SequenceTrace

EXPECTED = "definition/eos"


def zeroed(logprobs: np.ndarray, sequence: SequenceTrace) -> np.ndarray:
    logprobs[sequence.ids == EOS] = 0.0
    return logprobs


def sides(workshop: Workshop) -> Sides:
    a, b = workshop.pair()
    return a, edited(b, zeroed)
