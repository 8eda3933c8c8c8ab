"""An FP32 model whose products take BF16 operands, accumulated and returned in FP32.

Met as `float32_matmul_precision("medium")` on one side.
"""

import torch

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "linear/operands"


class BF16Linear(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x.bfloat16().float(), self.weight.bfloat16().float())


def plant(model: Model) -> None:
    turn(model, "gate_proj|up_proj|down_proj", BF16Linear)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, dtype="float32")
