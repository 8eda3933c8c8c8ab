"""One side's output head stores FP32 logits (MiniMax-M1's fix), the other's BF16 logits."""

import torch

from zerogap.diagnose.corpus.workshop import Workshop, turn

EXPECTED = "head/output"


class Wide(torch.nn.Linear):
    def forward(self, x):
        return torch.nn.functional.linear(x.float(), self.weight.float())


def sides(workshop: Workshop):
    return workshop.pair(lambda m: turn(m, "lm_head", Wide))
