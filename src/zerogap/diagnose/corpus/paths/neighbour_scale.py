"""Activations are quantised to FP8 with one scale over the whole batch: a row changes with an unrelated neighbour.

Met as a public bug of an inference engine (a row's result changed with who shared its batch); harmless alone.
"""

import torch

from zerogap.diagnose.corpus.arithmetic import quantised
from zerogap.diagnose.corpus.open_modules import ExactLinear, exact
from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

# The scale covers the batch, so what else is in it matters.
EXPECTED = ("linear/scale", "linear/block", "neighbours/content")


class PerSequence(ExactLinear):
    """One scale per sequence: every row's sequence alone decides."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pieces = [quantised(part.reshape(-1, x.shape[-1]), 0, 0).to(x.dtype) for part in x]
        return super().forward(torch.stack(pieces).view(x.shape))


class PerBatch(ExactLinear):
    """One scale over all rows of the pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(quantised(x.reshape(-1, x.shape[-1]), 0, 0).to(x.dtype).view(x.shape))


def sequence(model: Model) -> None:
    exact(model)
    turn(model, "down_proj", PerSequence)


def batch(model: Model) -> None:
    exact(model)
    turn(model, "down_proj", PerBatch)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(batch, sequence, batches=((0, 1, 2, 3),))
