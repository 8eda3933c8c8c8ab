"""FP8 activations with one dynamic scale for all rows of the pass: a loud neighbour coarsens everyone's grid.

Per-tensor dynamic scaling is the default of vLLM's `quantization="fp8"` where no per-token kernel is at hand. All else
in this model gives a row the same bits in any company.
"""

import torch

from zerogap.diagnose.corpus.arithmetic import exact_linear, quantised
from zerogap.diagnose.corpus.open_modules import ExactLinear, exact
from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "neighbours/content"


class TensorScale(ExactLinear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = quantised(x.reshape(-1, x.shape[-1]), 0, 0).view(x.shape)
        return exact_linear(rows, self.weight.float()).to(x.dtype)


def plant(model: Model) -> None:
    exact(model)
    turn(model, "down_proj|o_proj", TensorScale)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, plant, batches=((0, 1, 2, 3),))
