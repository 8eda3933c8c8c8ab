"""The rollout's kept set is the nucleus of 0.9, renormalised, at temperature 0.8 on both sides; it does not say so.

Met with top_p left on in a recipe whose trainer knows of the temperature only.
"""

import dataclasses

import torch

from zerogap.diagnose.corpus.workshop import Sides, Workshop, retold
from zerogap.diagnose.trace import Definition

EXPECTED = "definition/kept_set"
TEMPERATURE, TOP_P = 0.8, 0.9


def nucleus(logits: torch.Tensor) -> torch.Tensor:
    ordered, order = torch.sort(logits / TEMPERATURE, descending=True)
    mass = torch.softmax(ordered, -1)
    outside = mass.cumsum(-1) - mass >= TOP_P - 0.02  # a little less, so that rounding excludes nothing that was drawn
    return torch.full_like(logits, -torch.inf).scatter(0, order[~outside], ordered[~outside])


def sides(workshop: Workshop) -> Sides:
    sequences = workshop.sequences(kept=nucleus)
    plain, kept = Definition(TEMPERATURE, True), Definition(TEMPERATURE, True, top_p=TOP_P)
    trainer = workshop.torch_side(workshop.model(), sequences, name="trainer", definition=plain)
    rollout = workshop.torch_side(workshop.model(), sequences, name="rollout", definition=kept)
    silent = dataclasses.replace(rollout.trace.recorded, definition=plain)
    return trainer, retold(rollout, passes=(silent,))
