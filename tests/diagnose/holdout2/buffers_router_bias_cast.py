"""The router's correction bias was cast to BF16 with the model; the trainer keeps FP32.

Met with bias values near 8, where BF16 has steps of 0.06, in engines that cast every tensor.
"""

import torch

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop

EXPECTED = "buffers/dtype"


def biased(model: Model) -> None:
    generator = torch.Generator().manual_seed(8)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(8.0 + 0.2 * torch.rand(buffer.shape, generator=generator))


def plant(model: Model) -> None:
    biased(model)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(buffer.bfloat16().float())


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, biased, family="deepseek_v3")
