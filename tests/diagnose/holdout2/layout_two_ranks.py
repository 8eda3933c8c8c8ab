"""Projections into the residual stream are split over two ranks, each part rounded to BF16 before the sum.

Met between an engine with tensor parallel size 2 and a trainer with 1; both say so.
"""

import torch

from zerogap.diagnose.corpus.arithmetic import split_linear
from zerogap.diagnose.corpus.workshop import Sides, Workshop, retold, turn

EXPECTED = "layout/ranks"


class TwoRanks(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return split_linear(x, self.weight, 2, torch.bfloat16)


def sides(workshop: Workshop) -> Sides:
    trainer, engine = workshop.pair(lambda model: turn(model, "o_proj|down_proj", TwoRanks), family="qwen3")
    return (
        retold(trainer, layout={"tensor_parallel_size": 1}),
        retold(engine, layout={"tensor_parallel_size": 2}),
    )
