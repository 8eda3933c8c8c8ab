"""Packed samples: from the second sample on, entry i is the log-prob of token i - 1 (case 4 of the public list)."""

import numpy as np

from zerogap.diagnose.corpus.workshop import Workshop, edited

EXPECTED = "definition/shift"


def sides(workshop: Workshop):
    a, b = workshop.pair()
    first = b.trace.sequences[0]

    def late(p, s):
        return p if s is first else np.concatenate([[np.nan], p[:-1]]).astype(np.float32)

    return a, edited(b, late)
