"""Logits are rounded to BF16 before the log-softmax; the other side keeps them FP32 over the same BF16 operands.

Met between trainers that return the model's dtype and engines that compute logits in FP32.
"""

import torch

from zerogap.diagnose.corpus.workshop import Sides, Workshop, turn

EXPECTED = "head/output"


class WideHead(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x.float(), self.weight.float())


class RoundedHead(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x.float(), self.weight.float()).bfloat16()


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(
        lambda model: turn(model, "lm_head", RoundedHead), lambda model: turn(model, "lm_head", WideHead)
    )
