"""A packed sample's positions count on from the sample before it instead of starting at zero.

Met in trainers that pack samples and let the model make the positions.
"""

from typing import Any

import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "rope/positions"


class PackedRotary(LlamaRotaryEmbedding):
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return super().forward(x, position_ids + 57)


def plant(model: Model) -> None:
    turn(model, "rotary_emb", PackedRotary)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant)
