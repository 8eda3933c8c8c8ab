"""The trainer's low-rank update of queries and values was never sent; the engine samples from the base.

Met when merged adapters are left out of a weight sync.
"""

import torch

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop

EXPECTED = "weights/stale"


@torch.no_grad()
def plant(model: Model) -> None:
    generator = torch.Generator().manual_seed(11)
    for layer in model.model.layers:
        for part in (layer.self_attn.q_proj, layer.self_attn.v_proj):
            down = torch.randn(4, part.in_features, generator=generator) * 0.05
            up = torch.randn(part.out_features, 4, generator=generator) * 0.05
            part.weight.add_((up @ down).to(part.weight.dtype))


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(
        plant,
    )
