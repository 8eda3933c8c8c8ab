"""Weights are FP8 on both sides, activations on one only.

Met with weight-only FP8 (Marlin) on cards without FP8 units.
"""

import torch

from zerogap.diagnose.corpus.fp8.operands import WIDE, BlockLinear
from zerogap.diagnose.corpus.workshop import Sides, Workshop, turn

EXPECTED = "linear/operands"
MLP = "gate_proj|up_proj|down_proj"


class WeightOnlyLinear(BlockLinear):
    def rows(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(-1, x.shape[-1]).float()


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(
        lambda model: turn(model, MLP, WeightOnlyLinear), lambda model: turn(model, MLP, BlockLinear), facts=WIDE
    )
