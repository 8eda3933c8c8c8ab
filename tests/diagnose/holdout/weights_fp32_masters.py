"""The trainer computes with FP32 masters of all layers, the engine with their BF16 rounding (in FP32 arithmetic)."""

import torch

from zerogap.diagnose.corpus.workshop import Workshop

EXPECTED = "weights/dtype"


@torch.no_grad()
def change(model):
    for parameter in model.parameters():
        parameter.copy_(parameter.to(torch.bfloat16).to(parameter.dtype))


def sides(workshop: Workshop):
    return workshop.pair(change, dtype="float32")
