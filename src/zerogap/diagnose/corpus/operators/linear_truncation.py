"""Results are cut to BF16 instead of rounded to the nearest.

Met in kernels that take the upper half of the FP32 word, which is one instruction less.
"""

import torch

from zerogap.diagnose.corpus.arithmetic import truncated
from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "linear/rounding"


class CutLinear(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = torch.nn.functional.linear(x.float(), self.weight.float())
        return truncated(wide).to(x.dtype)


def plant(model: Model) -> None:
    turn(model, "layers.0.self_attn.o_proj|layers.1.self_attn.o_proj", CutLinear)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant)
