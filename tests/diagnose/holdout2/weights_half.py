"""The engine has the trainer's FP32 weights rounded to FP16 and computes in FP32.

Met when weights are published in FP16 between trainer and engine.
"""

import torch

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop

EXPECTED = "weights/dtype"


@torch.no_grad()
def masters(model: Model) -> None:
    """Weights with all bits of FP32, the same at every call."""
    generator = torch.Generator().manual_seed(3)
    for weight in model.parameters():
        weight.mul_(1.0 + 1e-3 * torch.randn(weight.shape, generator=generator))


@torch.no_grad()
def plant(model: Model) -> None:
    masters(model)
    for weight in model.parameters():
        weight.copy_(weight.half().float())


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, dtype="float32", other=masters, family="qwen3")
