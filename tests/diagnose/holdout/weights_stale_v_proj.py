"""One bucket of the weight update never arrived: v_proj of layer 1 is a step old (values differ by 0.002)."""

import torch

from zerogap.diagnose.corpus.workshop import Workshop

EXPECTED = "weights/stale"


@torch.no_grad()
def change(model):
    weight = model.model.layers[1].self_attn.v_proj.weight
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(3))
    weight.copy_((weight.float() + 2e-3 * noise).to(weight.dtype))


def sides(workshop: Workshop):
    return workshop.pair(change)
