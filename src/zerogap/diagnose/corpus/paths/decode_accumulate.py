"""For a single row the MLP's down projection runs in a GEMV that accumulates in BF16.

Met with kernels for one row, written by somebody else than those for many.
"""

import torch

from zerogap.diagnose.corpus.arithmetic import chain, products
from zerogap.diagnose.corpus.open_modules import ExactLinear, exact
from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "linear/accumulate"


class RowLinear(ExactLinear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-2] > 1:
            return super().forward(x)
        total = chain(products(x, self.weight, range(x.shape[-1])), torch.bfloat16)
        return total.view(*x.shape[:-1], -1)


def plant(model: Model) -> None:
    exact(model)
    turn(model, "down_proj", RowLinear)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, exact, path="decode")
