"""Projections into the residual stream sum K in four parts that are added at the end.

Met with split-K kernels of GPU libraries, which choose the number of parts by the number of rows.
"""

import torch

from zerogap.diagnose.corpus.arithmetic import split_linear
from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "linear/split"


class SplitLinear(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return split_linear(x, self.weight, 4)


def plant(model: Model) -> None:
    turn(model, "o_proj|down_proj", SplitLinear)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, dtype="float32")
