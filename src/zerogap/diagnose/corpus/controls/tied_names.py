"""A tied model whose head is a parameter of its own with the same numbers on one side."""

import torch

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop

EXPECTED = "clean"


def plant(model: Model) -> None:
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, facts={"tied": True})
