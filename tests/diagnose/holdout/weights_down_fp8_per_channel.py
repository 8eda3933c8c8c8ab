"""The engine loaded a checkpoint whose down projections went through FP8 with one scale per output channel."""

import torch

from zerogap.diagnose.corpus.workshop import Workshop

EXPECTED = "weights/quantised"


@torch.no_grad()
def change(model):
    from zerogap.diagnose.corpus.arithmetic import quantised

    for layer in model.model.layers:
        weight = layer.mlp.down_proj.weight
        weight.copy_(quantised(weight, 1, 0).to(weight.dtype))


def sides(workshop: Workshop):
    return workshop.pair(change)
