"""The table of cosines and sines is kept in BF16 although the model computes in FP32.

Met with engines whose rotary cache has the serving dtype.
"""

from typing import Any

import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "rope/rounding"


class CachedRotary(Qwen3RotaryEmbedding):
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        cos, sin = super().forward(x, position_ids)
        return cos.bfloat16().to(x.dtype), sin.bfloat16().to(x.dtype)


def plant(model: Model) -> None:
    turn(model, "rotary_emb", CachedRotary)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, family="qwen3", dtype="float32")
