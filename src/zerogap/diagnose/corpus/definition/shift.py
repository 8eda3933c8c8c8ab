"""Each log-prob stands one token too late: the trainer did not shift logits against labels.

Met in hand-written log-prob code; the values are right, the places are not.
"""

import numpy as np

from zerogap.diagnose.corpus.workshop import Sides, Workshop, edited

EXPECTED = "definition/shift"


def sides(workshop: Workshop) -> Sides:
    a, b = workshop.pair()
    return a, edited(b, lambda logprobs, sequence: np.concatenate([[np.nan], logprobs[:-1]]))
