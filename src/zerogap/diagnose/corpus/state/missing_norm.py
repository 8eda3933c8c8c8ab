"""The final norm's weight was not loaded: it is what a new model has, ones.

Met when a loader's name map lacks an entry and nobody counts what was loaded.
"""

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop

EXPECTED = "weights/missing"


def plant(model: Model) -> None:
    model.model.norm.weight.data.fill_(1.0)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant)
