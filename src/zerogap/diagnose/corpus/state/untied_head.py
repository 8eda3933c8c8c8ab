"""The head of a tied model is a copy that was not updated with the embedding.

Met when an engine copies the tied weight at load time and updates by name afterwards.
"""

import torch

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop

EXPECTED = "weights/tied"


@torch.no_grad()
def train(model: Model) -> None:
    weight = model.model.embed_tokens.weight
    step = 0.01 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(3))
    weight.copy_((weight.float() * (1.0 + step)).to(weight.dtype))


def plant(model: Model) -> None:
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    train(model)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, train, facts={"tied": True})
