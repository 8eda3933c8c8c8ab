"""As `temperature`, but the rollout's recording does not say at which temperature.

Met with log-probs that come out of a server without the request that made them.
"""

import dataclasses

from zerogap.diagnose.corpus.workshop import Sides, Workshop, retold
from zerogap.diagnose.trace import Definition

EXPECTED = "definition/temperature"


def sides(workshop: Workshop) -> Sides:
    a, b = workshop.pair(definition=Definition(0.6, True))
    silent = dataclasses.replace(b.trace.recorded, definition=Definition())
    return a, retold(b, passes=(silent,))
