"""A projection is all zeros in the checkpoint: a boundary of zeros on both sides says nothing, and is no fault."""

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop

EXPECTED = "clean"


def plant(model: Model) -> None:
    model.model.layers[0].mlp.down_proj.weight.data.zero_()
    model.model.layers[1].self_attn.v_proj.weight.data.zero_()


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, plant)
