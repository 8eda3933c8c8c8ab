"""The end-of-sequence token was appended by the client and recorded with log-prob 0.

Met with agents' loops that end a turn themselves.
"""

import numpy as np

from zerogap.diagnose.corpus.workshop import Sides, Workshop, edited
from zerogap.diagnose.trace import SequenceTrace

EXPECTED = "definition/eos"


def change(logprobs: np.ndarray, sequence: SequenceTrace) -> np.ndarray:
    if sequence.finish_reason == "stop":
        logprobs[-1] = 0.0
    return logprobs


def sides(workshop: Workshop) -> Sides:
    a, b = workshop.pair(family="qwen3")
    return a, edited(b, change)
