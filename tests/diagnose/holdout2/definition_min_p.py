"""The engine renormalises over the tokens that min-p 0.05 kept; the trainer scores over all.

Met with samplers whose filter is on by default.
"""

import math

import torch

from zerogap.diagnose.corpus.workshop import Sides, Workshop
from zerogap.diagnose.trace import Definition

EXPECTED = "definition/kept_set"


SHARE = 0.05


def kept(logits: torch.Tensor) -> torch.Tensor:
    bound = logits.amax(-1, keepdim=True) + math.log(SHARE)
    return logits.masked_fill(logits < bound, -torch.inf)


def sides(workshop: Workshop) -> Sides:
    sequences = workshop.sequences("llama", "bfloat16", kept=kept)
    trainer = workshop.torch_side(workshop.model(), sequences, name="trainer")
    definition = Definition(1.0, True, min_p=SHARE)
    return trainer, workshop.torch_side(workshop.model(), sequences, name="engine", definition=definition)
