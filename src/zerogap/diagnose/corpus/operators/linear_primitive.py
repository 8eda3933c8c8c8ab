"""Products are added by fused multiply-add on one side, by a multiplication and an addition on the other.

Met between compilers: one contracts a * b + c, the other is not allowed to.
"""

import torch

from zerogap.diagnose.corpus.arithmetic import chain_linear
from zerogap.diagnose.corpus.workshop import Sides, Workshop, turn

EXPECTED = "linear/primitive"


class SeparateLinear(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return chain_linear(x, self.weight)


class FusedLinear(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return chain_linear(x, self.weight, fused=True)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(
        lambda model: turn(model, "o_proj", FusedLinear),
        lambda model: turn(model, "o_proj", SeparateLinear),
        dtype="float32",
    )
