"""One projection sums from the last k to the first.

Met in kernels that count a loop down to save a register; harmless to everyone but a bitwise comparison.
"""

import torch

from zerogap.diagnose.corpus.arithmetic import chain_linear
from zerogap.diagnose.corpus.workshop import Sides, Workshop, turn

EXPECTED = "linear/order"


class AscendingLinear(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return chain_linear(x, self.weight)


class DescendingLinear(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return chain_linear(x, self.weight, descending=True)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(
        lambda model: turn(model, "layers.1.mlp.down_proj", DescendingLinear),
        lambda model: turn(model, "layers.1.mlp.down_proj", AscendingLinear),
        dtype="float32",
    )
