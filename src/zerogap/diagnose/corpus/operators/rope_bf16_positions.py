"""The cosine table is computed from BF16 angles: positions times frequencies lose their low bits.

Met when a whole model, rotary module included, is cast by `model.to(torch.bfloat16)`.
"""

from typing import Any

import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "rope/rounding"


class BF16Angles(LlamaRotaryEmbedding):
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        angles = (position_ids[..., None].float() * self.inv_freq.float()).bfloat16().float()
        angles = torch.cat((angles, angles), -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def plant(model: Model) -> None:
    turn(model, "rotary_emb", BF16Angles)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant)
