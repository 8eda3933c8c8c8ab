"""Gate and up rows of the experts are interleaved on one side and stacked on the other.

Met between checkpoints whose fused expert tensors have different layouts.
"""

import torch

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop

EXPECTED = "weights/permuted"


@torch.no_grad()
def plant(model: Model) -> None:
    for layer in model.model.layers:
        weight = layer.mlp.experts.gate_up_proj
        gate, up = weight.chunk(2, 1)
        weight.copy_(torch.stack([gate, up], 2).flatten(1, 2))


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, family="qwen3_moe")
