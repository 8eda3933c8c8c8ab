"""FP8 activations have one scale per token, against one per token and 128 columns.

Met between two FP8 recipes that both call themselves dynamic.
"""

import torch

from zerogap.diagnose.corpus.arithmetic import quantised, quantised_rows
from zerogap.diagnose.corpus.workshop import Sides, Workshop, turn

EXPECTED = "linear/block"


FACTS = {"hidden_size": 256, "intermediate_size": 512}


class Grouped(torch.nn.Linear):
    columns = 128

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = quantised_rows(x, self.columns)
        y = torch.nn.functional.linear(rows, quantised(self.weight, 128, 128))
        return y.to(x.dtype).view(*x.shape[:-1], -1)


class PerToken(Grouped):
    columns = 0


def sides(workshop: Workshop) -> Sides:
    names = r"gate_proj|up_proj|down_proj"
    return workshop.pair(
        lambda model: turn(model, names, PerToken), lambda model: turn(model, names, Grouped), facts=FACTS
    )
