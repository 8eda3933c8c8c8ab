"""The trainer casts the whole model to BF16, the rotary frequencies with it.

NVIDIA-NeMo/Automodel#2549, huggingface/transformers#25681: `module.to(bfloat16)` rounds every floating buffer.
"""

import torch

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop

EXPECTED = "buffers/dtype"


def cast(model: Model) -> None:
    model.to(torch.bfloat16)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(other=cast, family="qwen3")
