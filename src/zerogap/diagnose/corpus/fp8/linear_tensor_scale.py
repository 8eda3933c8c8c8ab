"""One FP8 scale per weight tensor and per activation tensor instead of per block.

Met between an engine's dynamic per-tensor FP8 and a trainer with DeepSeek's blocks.
"""

import torch

from zerogap.diagnose.corpus.arithmetic import quantised
from zerogap.diagnose.corpus.fp8.operands import WIDE, BlockLinear
from zerogap.diagnose.corpus.workshop import Sides, Workshop, turn

# What a scale covers is the size of its block.
EXPECTED = ("linear/block", "linear/scale")
MLP = "gate_proj|up_proj|down_proj"


class TensorLinear(BlockLinear):
    def rows(self, x: torch.Tensor) -> torch.Tensor:
        return quantised(x.reshape(-1, x.shape[-1]), 0, 0)

    def columns(self) -> torch.Tensor:
        return quantised(self.weight, 0, 0)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(
        lambda model: turn(model, MLP, TensorLinear), lambda model: turn(model, MLP, BlockLinear), facts=WIDE
    )
