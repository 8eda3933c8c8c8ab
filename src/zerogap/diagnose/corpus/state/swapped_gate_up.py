"""Gate and up of one layer are exchanged.

Met when a fused gate-up tensor is split in the wrong order.
"""

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop

EXPECTED = "weights/swapped"


def plant(model: Model) -> None:
    mlp = model.model.layers[1].mlp
    mlp.gate_proj.weight, mlp.up_proj.weight = mlp.up_proj.weight, mlp.gate_proj.weight


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant)
