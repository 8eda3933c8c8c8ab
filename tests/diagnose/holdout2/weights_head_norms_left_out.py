"""Query and key norms were never loaded and are ones.

Met with loaders that skip unexpected names in silence.
"""

import torch

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop

EXPECTED = "weights/missing"


@torch.no_grad()
def plant(model: Model) -> None:
    for layer in model.model.layers:
        layer.self_attn.q_norm.weight.fill_(1.0)
        layer.self_attn.k_norm.weight.fill_(1.0)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, family="qwen3")
