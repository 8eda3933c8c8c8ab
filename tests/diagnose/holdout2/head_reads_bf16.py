"""The head of an FP32 model reads hidden states and weights rounded to BF16; its logits are FP32.

Met when the head alone runs under autocast with FP32 output.
"""

import torch

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "head/operands"


class NarrowHead(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:

        return torch.nn.functional.linear(x.bfloat16().float(), self.weight.bfloat16().float())


def plant(model: Model) -> None:
    turn(model, r"lm_head", NarrowHead)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, family="qwen3", dtype="float32")
