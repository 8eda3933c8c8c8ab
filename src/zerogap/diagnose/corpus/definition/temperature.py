"""The rollout samples at temperature 0.7 and records under that distribution; the trainer scores at 1.0.

Met in every first RL run: the temperature is a setting of the sampler, and the loss does not know it.
"""

from zerogap.diagnose.corpus.workshop import Sides, Workshop
from zerogap.diagnose.trace import Definition

EXPECTED = "definition/temperature"


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(definition=Definition(0.7, True))
