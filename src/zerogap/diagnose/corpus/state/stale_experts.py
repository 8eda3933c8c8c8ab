"""One expert's down projection is the one from before the update.

Met with fused expert tensors, whose slices are sent one by one.
"""

import torch

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop

EXPECTED = "weights/stale"


@torch.no_grad()
def train(model: Model) -> None:
    weight = model.model.layers[1].mlp.experts.down_proj
    step = 0.01 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(9))
    weight.copy_((weight.float() * (1.0 + step)).to(weight.dtype))


def train_but_one(model: Model) -> None:
    weight = model.model.layers[1].mlp.experts.down_proj
    old = weight.detach()[2].clone()
    train(model)
    weight.data[2] = old


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(train_but_one, train, family="qwen3_moe")
