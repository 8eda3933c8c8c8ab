"""Block scales of FP8 weights are stored as BF16 on one side and as FP32 on the other.

Met when a checkpoint's `weight_scale_inv` is cast with the model.
"""

import torch

from zerogap.diagnose.corpus.arithmetic import e4m3, quantised_rows
from zerogap.diagnose.corpus.workshop import Sides, Workshop, turn

EXPECTED = "linear/scale"


class Blocks(torch.nn.Linear):
    storage = torch.float32

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        height, width = self.weight.shape
        blocks = self.weight.float().view(height // 64, 64, width // 64, 64)
        scale = (blocks.abs().amax((1, 3), keepdim=True) / 448.0).to(self.storage).float()
        weight = (e4m3(blocks / scale) * scale).view(height, width)
        y = torch.nn.functional.linear(quantised_rows(x, 64), weight)
        return y.to(x.dtype).view(*x.shape[:-1], -1)


class NarrowScales(Blocks):
    storage = torch.bfloat16


def sides(workshop: Workshop) -> Sides:
    names = r"\w+_proj"
    return workshop.pair(lambda model: turn(model, names, NarrowScales), lambda model: turn(model, names, Blocks))
