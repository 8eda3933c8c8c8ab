"""final_logit_softcapping 12 in one side, forgotten in the other (Gemma 2)."""

import torch

from zerogap.diagnose.corpus.workshop import Workshop, turn

EXPECTED = "head/formula"


class Capped(torch.nn.Linear):
    def forward(self, x):
        return torch.tanh(super().forward(x) / 12.0) * 12.0


def sides(workshop: Workshop):
    return workshop.pair(None, lambda m: turn(m, "lm_head", Capped))
