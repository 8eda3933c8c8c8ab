"""One tensor of the rollout is the one from before the update.

Met when a weight transfer goes by a list of names and one name is not on it.
"""

import torch

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop

EXPECTED = "weights/stale"


@torch.no_grad()
def train(model: Model) -> None:
    """An optimizer step of every weight."""
    generator = torch.Generator().manual_seed(11)
    for parameter in model.parameters():
        step = 0.004 * torch.randn(parameter.shape, generator=generator)
        parameter.copy_((parameter.float() * (1.0 + step)).to(parameter.dtype))


def train_but_one(model: Model) -> None:
    old = model.model.layers[1].mlp.up_proj.weight.detach().clone()
    train(model)
    model.model.layers[1].mlp.up_proj.weight.data.copy_(old)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(train_but_one, train)
