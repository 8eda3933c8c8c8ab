"""Each log-prob stands one token too early, in a recording that cannot be asked again.

Met with arrays that were cut at the prompt's length before the shift, not after.
"""

import numpy as np

from zerogap.diagnose.corpus.workshop import Sides, Workshop, edited
from zerogap.diagnose.side import RecordedSide

EXPECTED = "definition/shift"


def sides(workshop: Workshop) -> Sides:
    a, b = workshop.pair()
    return a, RecordedSide(edited(b, lambda logprobs, sequence: np.concatenate([logprobs[1:], [np.nan]])).trace)
