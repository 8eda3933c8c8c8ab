"""The two layers' post-attention norms are exchanged.

Met with pipeline stages that renumber their layers from zero.
"""

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop

EXPECTED = "weights/swapped"


def plant(model: Model) -> None:
    first, second = (layer.post_attention_layernorm for layer in model.model.layers)
    first.weight, second.weight = second.weight, first.weight


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant)
