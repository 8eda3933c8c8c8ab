"""Split-K of the down projections chosen by two autotuners: 2 parts on one side, 8 on the other; an
FP32 model, whose bits show it."""

import torch

from zerogap.diagnose.corpus.arithmetic import split_linear
from zerogap.diagnose.corpus.workshop import Workshop, turn

EXPECTED = "linear/split"


class Split(torch.nn.Linear):
    parts = 1

    def forward(self, x):
        return split_linear(x, self.weight, self.parts)


def sides(workshop: Workshop):
    return workshop.pair(
        lambda m: turn(m, "down_proj", Split, parts=8),
        lambda m: turn(m, "down_proj", Split, parts=2),
        dtype="float32",
    )
