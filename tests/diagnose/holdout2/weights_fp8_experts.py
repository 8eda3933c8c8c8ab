"""The engine loaded experts that went through blockwise E4M3; the trainer has the BF16 ones.

Met when an FP8 edition of a model serves and its BF16 edition trains.
"""

import torch

from zerogap.diagnose.corpus.arithmetic import quantised
from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop

EXPECTED = "weights/quantised"


@torch.no_grad()
def plant(model: Model) -> None:
    for layer in model.model.layers:
        experts = layer.mlp.experts
        for stacked in (experts.gate_up_proj, experts.down_proj):
            for weight in stacked:
                weight.copy_(quantised(weight, 128, 128).to(weight.dtype))


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, family="qwen3_moe")
