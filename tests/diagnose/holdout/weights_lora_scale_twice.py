"""A merged adapter's factor went into o_proj of layer 1 as a whole: it is multiplied by 1.3."""

import torch

from zerogap.diagnose.corpus.workshop import Workshop

EXPECTED = "weights/scaled"


@torch.no_grad()
def change(model):
    weight = model.model.layers[1].self_attn.o_proj.weight
    weight.copy_((weight.float() * 1.3).to(weight.dtype))


def sides(workshop: Workshop):
    return workshop.pair(change)
