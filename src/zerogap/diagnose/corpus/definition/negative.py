"""Negative log-likelihoods are recorded as log-probs.

Met where a loss without reduction is stored.
"""

from zerogap.diagnose.corpus.workshop import Sides, Workshop, edited

EXPECTED = "definition/unit"


def sides(workshop: Workshop) -> Sides:
    a, b = workshop.pair()
    return a, edited(b, lambda logprobs, sequence: -logprobs)
