"""The engine renormalises over its 20 likeliest tokens, the trainer over the whole vocabulary.

modelscope/ms-swift#8442, huggingface/trl#6945: processed log-probs include top-k, and the loss knows temperature only.
"""

import torch

from zerogap.diagnose.corpus.workshop import Sides, Workshop
from zerogap.diagnose.trace import Definition

EXPECTED = "definition/kept_set"


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    return logits.masked_fill(logits < logits.topk(20).values[-1], -torch.inf)


def sides(workshop: Workshop) -> Sides:
    a, b = workshop.model("qwen2"), workshop.model("qwen2")
    known = workshop.sequences("qwen2", kept=likeliest)
    trainer = workshop.torch_side(a, known, name="trainer")
    return trainer, workshop.torch_side(b, known, name="rollout", definition=Definition(1.0, True, top_k=20))
