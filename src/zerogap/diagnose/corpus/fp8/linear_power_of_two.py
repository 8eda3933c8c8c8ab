"""FP8 scales are rounded up to powers of two (UE8M0) on one side.

Met between Hopper and Blackwell formats of one recipe.
"""

import torch

from zerogap.diagnose.corpus.arithmetic import quantised, quantised_rows
from zerogap.diagnose.corpus.fp8.operands import WIDE, BlockLinear
from zerogap.diagnose.corpus.workshop import Sides, Workshop, turn

EXPECTED = "linear/scale"
MLP = "gate_proj|up_proj|down_proj"


class PowerLinear(BlockLinear):
    def rows(self, x: torch.Tensor) -> torch.Tensor:
        return quantised_rows(x, 128, power_of_two=True)

    def columns(self) -> torch.Tensor:
        return quantised(self.weight, 128, 128, power_of_two=True)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(
        lambda model: turn(model, MLP, PowerLinear), lambda model: turn(model, MLP, BlockLinear), facts=WIDE
    )
