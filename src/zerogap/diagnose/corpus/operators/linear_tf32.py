"""Operands of FP32 products are rounded to TF32.

Met as `torch.backends.cuda.matmul.allow_tf32`, on in one process and off in the other.
"""

import torch

from zerogap.diagnose.corpus.arithmetic import tf32
from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "linear/operands"


class TF32Linear(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(tf32(x), tf32(self.weight))


def plant(model: Model) -> None:
    turn(model, r"\w_proj|\w+_proj", TF32Linear)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, dtype="float32")
