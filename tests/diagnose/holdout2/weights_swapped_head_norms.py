"""The weights of query and key norm changed places.

Met in weight maps that match names by order.
"""

import torch

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop

EXPECTED = "weights/swapped"


@torch.no_grad()
def plant(model: Model) -> None:
    for layer in model.model.layers:
        q, k = layer.self_attn.q_norm.weight, layer.self_attn.k_norm.weight
        q.data, k.data = k.data.clone(), q.data.clone()


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, family="qwen3")
