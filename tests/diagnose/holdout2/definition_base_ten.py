"""The recorded numbers are logarithms to base 10.

Met where a service reports decibels or log10 scores.
"""

import numpy as np

from zerogap.diagnose.corpus.workshop import Sides, Workshop, edited
from zerogap.diagnose.trace import SequenceTrace

EXPECTED = "definition/unit"


def change(logprobs: np.ndarray, sequence: SequenceTrace) -> np.ndarray:
    return logprobs / np.log(10.0)


def sides(workshop: Workshop) -> Sides:
    a, b = workshop.pair(family="llama")
    return a, edited(b, change)
