"""A tied model whose head was sent as a copy of the embedding: the same values, two tensors. Nothing differs."""

import torch

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop

EXPECTED = "clean"


def copied(model: Model) -> None:
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(copied, family="qwen2", facts={"tied": True})
