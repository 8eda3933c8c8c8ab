"""Updates are multiplied by 0.7 before they are added.

Met when a `residual_multiplier` (Granite) is read from a config that does not have one, with another default.
"""

import torch

from zerogap.diagnose.corpus.open_modules import OpenLayer
from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "residual/formula"


class ScaledLayer(OpenLayer):
    def add(self, residual: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        return residual + 0.7 * update


def plant(model: Model) -> None:
    turn(model, r"layers\.1", ScaledLayer)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant)
