"""GELU (tanh form) where the config says SiLU.

Met when a gated MLP is shared between families and the activation is a default argument.
"""

import torch

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop

EXPECTED = "activation/formula"


def plant(model: Model) -> None:
    for layer in model.model.layers:
        layer.mlp.act_fn = torch.nn.GELU(approximate="tanh")


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant)
