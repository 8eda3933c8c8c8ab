"""Rows decoded alone are rotated for the next position.

Met where the position is read after the cache's length was counted up.
"""

from typing import Any

import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from zerogap.diagnose.corpus.open_modules import exact
from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "rope/positions"


class LateRotary(LlamaRotaryEmbedding):
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return super().forward(x, position_ids + 1 if position_ids.shape[1] == 1 else position_ids)


def plant(model: Model) -> None:
    exact(model)
    turn(model, "rotary_emb", LateRotary)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, exact, path="decode")
