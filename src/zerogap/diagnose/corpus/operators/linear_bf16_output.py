"""The projections of an FP32 model return BF16-rounded numbers.

Met where autocast was meant for one module and wraps all: products are FP32, what is stored is not.
"""

import torch

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "linear/output"


class NarrowLinear(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).bfloat16().float()


def plant(model: Model) -> None:
    turn(model, "o_proj|down_proj", NarrowLinear)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, dtype="float32")
