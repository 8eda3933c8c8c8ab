"""Partial sums of a projection are added in another order in every run, as atomic additions do.

Met with split-K kernels that reduce by atomics; two runs of one program differ.
"""

import torch

from zerogap.diagnose.corpus.arithmetic import chain
from zerogap.diagnose.corpus.workshop import Sides, Workshop, turn

# What differs from run to run is the order.
EXPECTED = ("rerun/nondeterministic", "linear/order")


class AtomicLinear(torch.nn.Linear):
    generator = torch.Generator().manual_seed(12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pieces = zip(x.chunk(8, -1), self.weight.chunk(8, -1), strict=True)
        parts = [torch.nn.functional.linear(a, b) for a, b in pieces]
        return chain(parts[i] for i in torch.randperm(8, generator=self.generator))


class OrderedLinear(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pieces = zip(x.chunk(8, -1), self.weight.chunk(8, -1), strict=True)
        return chain(torch.nn.functional.linear(a, b) for a, b in pieces)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(
        lambda model: turn(model, "o_proj|down_proj", AtomicLinear),
        lambda model: turn(model, "o_proj|down_proj", OrderedLinear),
        dtype="float32",
    )
