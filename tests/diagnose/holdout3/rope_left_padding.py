"""The trainer's positions count the padding to the left: every token is rotated eleven places too far.

huggingface/trl#6800, OpenRLHF/OpenRLHF#217: log-probs of left-padded prompts without `position_ids`. Rotary distances
are the same, bits are not.
"""

from typing import Any

import torch
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "rope/positions"


class Padded(Qwen2RotaryEmbedding):
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return super().forward(x, position_ids + 11)


def plant(model: Model) -> None:
    turn(model, "rotary_emb", Padded)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(other=plant, family="qwen2")
