"""MLP products take FP8 operands (weights 128x128, activations 1x128); the other side computes in BF16.

Met with FP8 rollouts of a BF16 trainer.
"""

import torch

from zerogap.diagnose.corpus.fp8.operands import WIDE, BlockLinear
from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "linear/operands"


def plant(model: Model) -> None:
    turn(model, "gate_proj|up_proj|down_proj", BlockLinear)


class PlainLinear(torch.nn.Linear):
    """The same library call over the BF16 operands themselves."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x.float(), self.weight.float()).to(x.dtype)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, lambda model: turn(model, "gate_proj|up_proj|down_proj", PlainLinear), facts=WIDE)
