"""The head sums K in two halves (rows of the hidden dimension on two devices), in an FP32 model.

Met with a row-parallel head.
"""

import torch

from zerogap.diagnose.corpus.arithmetic import split_linear
from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "head/split"


class SplitHead(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return split_linear(x, self.weight, 2)


def plant(model: Model) -> None:
    turn(model, "lm_head", SplitHead)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, dtype="float32")
