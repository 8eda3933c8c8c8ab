"""The MLP's products take FP16 operands in an FP32 model.

Met where an engine was started with dtype=half because the card has no BF16.
"""

import torch

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "linear/operands"


class HalfLinear(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x.half().float(), self.weight.half().float())


def plant(model: Model) -> None:
    turn(model, "gate_proj|up_proj|down_proj", HalfLinear)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, dtype="float32")
