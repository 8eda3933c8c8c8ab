"""The low frequencies of RoPE are divided by 8 on one side (Llama 3.1's scaling); the other does not scale.

Met with stacks that do not know a `rope_scaling` and ignore it.
"""

import torch

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop

EXPECTED = ("buffers/stale", "rope/formula")


def plant(model: Model) -> None:
    frequencies = model.model.rotary_emb.inv_freq
    frequencies.copy_(torch.where(frequencies < 0.05, frequencies / 8.0, frequencies))


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant)
