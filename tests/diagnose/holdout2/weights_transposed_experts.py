"""The experts' square down projections arrived transposed.

Met when stacked experts are kept as inputs by outputs in one stack and the other way in another.
"""

import torch

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop
from zerogap.models.moe_spec import MoESpec
from zerogap.ops.moe import Routing

EXPECTED = "weights/transposed"


SQUARE = MoESpec(Routing(8, 3, "softmax", normalise=True, scaling=1.0), expert_size=64)


@torch.no_grad()
def plant(model: Model) -> None:
    for layer in model.model.layers:
        weight = layer.mlp.experts.down_proj
        weight.copy_(weight.transpose(1, 2).clone())


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, family="qwen3_moe", facts={"moe": SQUARE})
