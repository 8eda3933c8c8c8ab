"""A fused QKV tensor was cut in the order q, v, k: k_proj and v_proj of layer 0 are exchanged."""

import torch

from zerogap.diagnose.corpus.workshop import Workshop

EXPECTED = "weights/swapped"


@torch.no_grad()
def change(model):
    attention = model.model.layers[0].self_attn
    k, v = attention.k_proj.weight.clone(), attention.v_proj.weight.clone()
    attention.k_proj.weight.copy_(v)
    attention.v_proj.weight.copy_(k)


def sides(workshop: Workshop):
    return workshop.pair(change)
