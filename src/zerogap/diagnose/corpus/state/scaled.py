"""Values of one layer are multiplied by 0.5: a LoRA's, or a quantiser's, scale applied twice.

Met when a merged adapter is merged again.
"""

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop

EXPECTED = "weights/scaled"


def plant(model: Model) -> None:
    model.model.layers[1].self_attn.v_proj.weight.data.mul_(0.5)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant)
