"""Every projection of the MLP sums K in two halves: two accumulators of one chain each, against one chain.

Met between two kernels of one library, of which one splits the reduction over two groups of warps.
"""

import torch

from zerogap.diagnose.corpus.arithmetic import chain, chain_linear
from zerogap.diagnose.corpus.workshop import Sides, Workshop, turn

EXPECTED = "linear/split"


class WholeLinear(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return chain_linear(x, self.weight)


class HalvedLinear(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pieces = zip(x.chunk(2, -1), self.weight.chunk(2, -1), strict=True)
        return chain(chain_linear(a, b) for a, b in pieces)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(
        lambda model: turn(model, "gate_proj|up_proj|down_proj", HalvedLinear),
        lambda model: turn(model, "gate_proj|up_proj|down_proj", WholeLinear),
        dtype="float32",
    )
