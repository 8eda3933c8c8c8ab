"""A square projection is transposed: both shapes fit.

Met between formats that store [in, out] and [out, in].
"""

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop

EXPECTED = "weights/transposed"


def plant(model: Model) -> None:
    weight = model.model.layers[0].self_attn.o_proj.weight
    weight.data = weight.data.t().contiguous()


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, facts={"num_heads": 4, "head_dim": 16})
