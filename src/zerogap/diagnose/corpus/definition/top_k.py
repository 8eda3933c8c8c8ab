"""The rollout keeps the 20 likeliest tokens and records under what is left; the trainer's softmax is over all.

Met with sampling defaults of a model folder (`generation_config.json`) that an engine applies unasked.
"""

import torch

from zerogap.diagnose.corpus.workshop import Sides, Workshop
from zerogap.diagnose.trace import Definition

EXPECTED = "definition/kept_set"
TOP_K = 20


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    return logits.masked_fill(logits < logits.topk(TOP_K).values[-1], -torch.inf)


def sides(workshop: Workshop) -> Sides:
    sequences = workshop.sequences(kept=likeliest)
    trainer = workshop.torch_side(workshop.model(), sequences, name="trainer")
    kept = Definition(1.0, True, top_k=TOP_K)
    return trainer, workshop.torch_side(workshop.model(), sequences, name="rollout", definition=kept)
