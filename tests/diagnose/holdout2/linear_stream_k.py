"""Products into the residual stream cut K into pieces of 48 and add the pieces; the other side takes K whole.

Met with stream-K schedules, whose cuts fall where the work of a core ends.
"""

import torch

from zerogap.diagnose.corpus.arithmetic import chain
from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "linear/split"


class Pieces(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pieces = zip(x.split(48, -1), self.weight.split(48, -1), strict=True)
        return chain(torch.nn.functional.linear(a, b) for a, b in pieces)


def plant(model: Model) -> None:
    turn(model, "o_proj|down_proj", Pieces)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, dtype="float32")
