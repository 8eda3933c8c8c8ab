"""Scales are amax / 240, the largest number of the other E4M3 (fnuz), instead of amax / 448.

Met with code for AMD's MI300 on other hardware.
"""

import torch

from zerogap.diagnose.corpus.arithmetic import quantised, quantised_rows
from zerogap.diagnose.corpus.fp8.operands import WIDE, BlockLinear
from zerogap.diagnose.corpus.workshop import Sides, Workshop, turn

EXPECTED = "linear/scale"
MLP = "gate_proj|up_proj|down_proj"


class SmallerLinear(BlockLinear):
    def rows(self, x: torch.Tensor) -> torch.Tensor:
        return quantised_rows(x, 128, largest=240.0)

    def columns(self) -> torch.Tensor:
        return quantised(self.weight, 128, 128, largest=240.0)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(
        lambda model: turn(model, MLP, SmallerLinear), lambda model: turn(model, MLP, BlockLinear), facts=WIDE
    )
