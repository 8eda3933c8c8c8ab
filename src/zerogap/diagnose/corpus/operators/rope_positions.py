"""Positions count from one on one side. Scores depend on differences only, so it shows as rounding noise.

Met with left padding, where one stack counts positions from the first real token and another from the padded row.
"""

from typing import Any

import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "rope/positions"


class FromOne(LlamaRotaryEmbedding):
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return super().forward(x, position_ids + 1)


def plant(model: Model) -> None:
    turn(model, "rotary_emb", FromOne)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant)
