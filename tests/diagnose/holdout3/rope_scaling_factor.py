"""Llama-3 rotary scaling: the trainer was told factor 32 and keeps the default 8; the engine scales by 32.

NVIDIA/Megatron-LM#6305: `--rope-scaling-factor` is parsed and never handed on. The original context is 16 tokens here,
so that the short sequences feel it.
"""

import math
from typing import Any

import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "rope/formula"
CONTEXT, LOW, HIGH = 16, 1.0, 4.0


class ScaledRotary(LlamaRotaryEmbedding):
    factor: float

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        frequencies = self.inv_freq.float()
        turns = CONTEXT * frequencies / (2 * math.pi)
        kept = ((turns - LOW) / (HIGH - LOW)).clamp(0.0, 1.0)
        frequencies = frequencies * kept + frequencies / self.factor * (1.0 - kept)
        angles = position_ids[..., None].float() * frequencies
        angles = torch.cat((angles, angles), -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def asked(model: Model) -> None:
    turn(model, "rotary_emb", ScaledRotary, factor=32.0)


def default(model: Model) -> None:
    turn(model, "rotary_emb", ScaledRotary, factor=8.0)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(asked, default, dtype="float32")
