"""From the third sequence of a batch on, results of a projection are cut to BF16 instead of rounded.

Met with kernels whose last tile takes another epilogue.
"""

import torch

from zerogap.diagnose.corpus.arithmetic import truncated
from zerogap.diagnose.corpus.open_modules import ExactLinear, exact
from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

# Where a sequence stands decides how its rows are rounded.
EXPECTED = ("neighbours/row", "linear/rounding")


class TailLinear(ExactLinear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        if len(x) > 2:
            wide = torch.matmul(x[2:].double(), self.weight.double().t())
            out[2:] = truncated(wide.float()).to(x.dtype)
        return out


def plant(model: Model) -> None:
    exact(model)
    turn(model, "o_proj", TailLinear)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, exact, batches=((0, 1, 2, 3),))
