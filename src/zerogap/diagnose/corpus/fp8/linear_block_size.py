"""FP8 blocks are 64 wide instead of 128.

Met when a kernel's tile size decides the block of the scales.
"""

import torch

from zerogap.diagnose.corpus.arithmetic import quantised, quantised_rows
from zerogap.diagnose.corpus.fp8.operands import WIDE, BlockLinear
from zerogap.diagnose.corpus.workshop import Sides, Workshop, turn

EXPECTED = "linear/block"
MLP = "gate_proj|up_proj|down_proj"


class NarrowLinear(BlockLinear):
    def rows(self, x: torch.Tensor) -> torch.Tensor:
        return quantised_rows(x, 64)

    def columns(self) -> torch.Tensor:
        return quantised(self.weight, 64, 64)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(
        lambda model: turn(model, MLP, NarrowLinear), lambda model: turn(model, MLP, BlockLinear), facts=WIDE
    )
