"""The rotary frequencies are BF16: the whole model was cast, buffers included.

Met as `model.to(torch.bfloat16)` after loading; positions far from zero rotate by wrong angles.
"""

import torch

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop

EXPECTED = ("buffers/dtype", "rope/rounding")


def plant(model: Model) -> None:
    model.model.rotary_emb.inv_freq.data = model.model.rotary_emb.inv_freq.data.to(torch.bfloat16)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant)
