"""Scores are divided by sqrt(hidden / heads) where head_dim says otherwise: 16 instead of 32 here.

Met with models whose head_dim is not hidden_size / num_heads (Qwen3 and others).
"""

from zerogap.diagnose.corpus.arithmetic import eager
from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, attend

EXPECTED = "attention/scale"


def plant(model: Model) -> None:
    size = model.config.hidden_size // model.config.num_attention_heads
    attend(model, "scale", lambda q, k, v, mask, scale: eager(q, k, v, mask, size**-0.5))


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant)
