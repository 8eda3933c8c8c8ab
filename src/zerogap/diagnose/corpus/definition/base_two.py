"""Log-probs are recorded in bits (base 2) in a recording that cannot be asked again.

Met with logs that were made for compression figures.
"""

import numpy as np

from zerogap.diagnose.corpus.workshop import Sides, Workshop, edited
from zerogap.diagnose.side import RecordedSide

EXPECTED = "definition/unit"


def sides(workshop: Workshop) -> Sides:
    a, b = workshop.pair()
    return a, RecordedSide(edited(b, lambda logprobs, sequence: logprobs / np.float32(np.log(2.0))).trace)
