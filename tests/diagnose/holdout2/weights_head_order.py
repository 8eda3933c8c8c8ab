"""Key heads arrived in reverse order from a fused tensor of queries, keys and values.

Met in conversions of interleaved QKV.
"""

import torch

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop

EXPECTED = "weights/permuted"


@torch.no_grad()
def plant(model: Model) -> None:
    weight = model.model.layers[0].self_attn.k_proj.weight
    weight.copy_(weight.view(2, 32, -1).flip(0).reshape(weight.shape))


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(
        plant,
    )
