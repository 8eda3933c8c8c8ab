"""The head's K is cut in four, and parts are kept in BF16 instead of FP32 until they are added.

Met with reduced-precision reduction in split-K products.
"""

import torch

from zerogap.diagnose.corpus.arithmetic import split_linear
from zerogap.diagnose.corpus.workshop import Sides, Workshop, turn

EXPECTED = "head/accumulate"


class WideParts(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return split_linear(x, self.weight, 4)


class NarrowParts(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return split_linear(x, self.weight, 4, torch.bfloat16)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(
        lambda model: turn(model, "lm_head", NarrowParts), lambda model: turn(model, "lm_head", WideParts)
    )
