"""The engine runs on two tensor-parallel ranks: each rank's partial sums are rounded to BF16 before the all-reduce.

Met with an engine at TP 2 against a trainer at TP 1; row-parallel layers, `o_proj` and `down_proj`, are concerned.
"""

import torch

from zerogap.diagnose.corpus.arithmetic import split_linear
from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, retold, turn

EXPECTED = "layout/ranks"


class RowParallel(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return split_linear(x, self.weight, 2, torch.bfloat16)


def plant(model: Model) -> None:
    turn(model, "o_proj|down_proj", RowParallel)


def sides(workshop: Workshop) -> Sides:
    trainer, rollout = workshop.pair(plant, family="qwen3")
    return retold(trainer, layout={"tensor_parallel_size": 1}), retold(rollout, layout={"tensor_parallel_size": 2})
