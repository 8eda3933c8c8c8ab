"""The engine's processed log-probs are renormalised over what min_p 0.05 kept; the trainer's are over all tokens
(TRL issue 6789)."""

import torch

from zerogap.diagnose.corpus.workshop import Workshop
from zerogap.diagnose.trace import Definition

EXPECTED = "definition/kept_set"


def kept(logits):
    probabilities = torch.softmax(logits, -1)
    return logits.masked_fill(probabilities < 0.05 * probabilities.max(), -torch.inf)


def sides(workshop: Workshop):
    sequences = workshop.sequences(kept=kept)
    plain = Definition(1.0, True, 0, 1.0, 0.0)
    a = workshop.torch_side(workshop.model(), sequences, name="trainer", definition=plain)
    b = workshop.torch_side(workshop.model(), sequences, name="rollout", definition=Definition(1.0, True, 0, 1.0, 0.05))
    return a, b
