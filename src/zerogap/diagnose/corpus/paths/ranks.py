"""The rollout runs on two ranks: projections into the residual stream are sums of two ranks' halves.

Met between tensor-parallel sizes of trainer and rollout; the layout is recorded.
"""

import torch

from zerogap.diagnose.corpus.arithmetic import split_linear
from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, retold, turn

# Two ranks make a split of two.
EXPECTED = ("linear/split", "layout/ranks")


class RankLinear(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return split_linear(x, self.weight, 2)


def plant(model: Model) -> None:
    turn(model, "o_proj|down_proj", RankLinear)


def sides(workshop: Workshop) -> Sides:
    a, b = workshop.pair(plant, dtype="float32")
    return (
        retold(a, layout={**a.trace.layout, "tensor_parallel_size": 1}),
        retold(b, layout={**b.trace.layout, "tensor_parallel_size": 2}),
    )
