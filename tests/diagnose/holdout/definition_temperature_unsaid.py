"""A rollout at temperature 0.85 whose log-probs are of that distribution and whose trace does not say so, against a
trainer that scores at 1 (case 1 of the public list)."""

import dataclasses

from zerogap.diagnose.corpus.workshop import EditedSide, Workshop
from zerogap.diagnose.trace import Definition

EXPECTED = "definition/temperature"


def sides(workshop: Workshop):
    a = workshop.torch_side(workshop.model(), name="trainer")
    b = workshop.torch_side(workshop.model(), name="rollout", definition=Definition(0.85, True))
    said = dataclasses.replace(b.trace.recorded, definition=Definition())
    return a, EditedSide(b, dataclasses.replace(b.trace, passes=(said,)))
