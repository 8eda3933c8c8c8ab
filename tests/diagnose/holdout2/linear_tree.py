"""Products of the up projection are added as a tree over adjacent pairs, against one running sum.

Met between an accelerator's adder tree and a serial loop over K.
"""

import torch

from zerogap.diagnose.corpus.arithmetic import adjacent, chain_linear
from zerogap.diagnose.corpus.workshop import Sides, Workshop, turn

EXPECTED = "linear/order"


class Serial(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return chain_linear(x, self.weight)


class Tree(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return adjacent(x[..., None, :] * self.weight)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(
        lambda model: turn(model, "up_proj", Tree), lambda model: turn(model, "up_proj", Serial), dtype="float32"
    )
