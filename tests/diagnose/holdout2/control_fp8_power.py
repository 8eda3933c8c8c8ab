"""A harmless difference: FP8 weights whose scales are powers of two, kept as FP32 on one side and BF16 on the other.

Met with power-of-two scales, which every float format holds exactly.
"""

import torch

from zerogap.diagnose.corpus.arithmetic import e4m3
from zerogap.diagnose.corpus.workshop import Sides, Workshop, turn

EXPECTED = "clean"


class Powers(torch.nn.Linear):
    storage = torch.float32

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.exp2(torch.ceil(torch.log2(self.weight.float().abs().amax() / 448.0))).to(self.storage).float()
        return torch.nn.functional.linear(x, (e4m3(self.weight.float() / scale) * scale).to(x.dtype))


class NarrowPowers(Powers):
    storage = torch.bfloat16


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(
        lambda model: turn(model, "down_proj", NarrowPowers), lambda model: turn(model, "down_proj", Powers)
    )
