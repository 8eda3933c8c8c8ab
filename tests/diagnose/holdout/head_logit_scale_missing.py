"""Cohere-like logit_scale 0.625, applied to the logits by one side only. Both say, and use, temperature 1."""

import torch

from zerogap.diagnose.corpus.workshop import Workshop, turn

EXPECTED = "head/scale"


class Scaled(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * 0.625


def sides(workshop: Workshop):
    return workshop.pair(None, lambda m: turn(m, "lm_head", Scaled))
