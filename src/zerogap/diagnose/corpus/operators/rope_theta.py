"""Rotation angles for theta 100,000 instead of 10,000.

Met when an engine reads `rope_theta` and the checkpoint writes `rope_parameters`, or the other way round.
"""

from typing import Any

import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "rope/formula"


class OtherTheta(LlamaRotaryEmbedding):
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        size = 2 * len(self.inv_freq)
        frequencies = 100000.0 ** -(torch.arange(0, size, 2).float() / size)
        angles = position_ids[..., None].float() * frequencies
        angles = torch.cat((angles, angles), -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def plant(model: Model) -> None:
    turn(model, "rotary_emb", OtherTheta)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant)
