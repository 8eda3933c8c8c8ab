"""Partial sums over four parts of K are stored in BF16 before they are added.

Met as `allow_bf16_reduced_precision_reduction`, which PyTorch leaves on by default for CUDA.
"""

import torch

from zerogap.diagnose.corpus.arithmetic import split_linear
from zerogap.diagnose.corpus.workshop import Sides, Workshop, turn

EXPECTED = "linear/accumulate"


class NarrowSplitLinear(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return split_linear(x, self.weight, 4, torch.bfloat16)


class WideSplitLinear(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return split_linear(x, self.weight, 4)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(
        lambda model: turn(model, "o_proj|down_proj", NarrowSplitLinear),
        lambda model: turn(model, "o_proj|down_proj", WideSplitLinear),
    )
