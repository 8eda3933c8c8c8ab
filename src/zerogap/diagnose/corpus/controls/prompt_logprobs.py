"""One side records log-probs of the prompt too, the other leaves them out; prompts do not count."""

import numpy as np

from zerogap.diagnose.corpus.workshop import Sides, Workshop, edited
from zerogap.diagnose.trace import SequenceTrace

EXPECTED = "clean"


def completion_only(logprobs: np.ndarray, sequence: SequenceTrace) -> np.ndarray:
    return np.where(sequence.counted, logprobs, np.float32(np.nan))


def sides(workshop: Workshop) -> Sides:
    a, b = workshop.pair()
    return a, edited(b, completion_only)
