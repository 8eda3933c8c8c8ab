"""The routed scaling factor (2.5) is not applied.

Met when a DeepSeek router is built from a generic top-k layer.
"""

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop

EXPECTED = "router/scale"


def plant(model: Model) -> None:
    model.model.layers[1].mlp.gate.routed_scaling_factor = 1.0


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, family="deepseek_v3")
