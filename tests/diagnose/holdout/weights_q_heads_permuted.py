"""Query heads in Megatron's order of groups on one side: heads 0, 2, 1, 3 of q_proj in both layers."""

import torch

from zerogap.diagnose.corpus.workshop import Workshop

EXPECTED = "weights/permuted"


@torch.no_grad()
def change(model):
    for layer in model.model.layers:
        weight = layer.self_attn.q_proj.weight
        heads = weight.view(4, 32, -1)
        weight.copy_(heads[[0, 2, 1, 3]].reshape(weight.shape))


def sides(workshop: Workshop):
    return workshop.pair(change)
