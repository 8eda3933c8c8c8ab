"""Rotation in FP32 with an FP32 table, rounded once; transformers multiplies by a BF16 table and rounds every step.

Met between inference kernels, which rotate in FP32, and the eager model in BF16.
"""

import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from zerogap.diagnose.corpus.open_modules import OpenAttention, Pair
from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "rope/rounding"


class WideTable(LlamaRotaryEmbedding):
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Pair:
        cos, sin = super().forward(x.float(), position_ids)
        return cos, sin


class WideAttention(OpenAttention):
    def rotate(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Pair:
        rotated = apply_rotary_pos_emb(q.float(), k.float(), cos, sin)
        return rotated[0].to(q.dtype), rotated[1].to(k.dtype)


def plant(model: Model) -> None:
    turn(model, "rotary_emb", WideTable)
    turn(model, "self_attn", WideAttention)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant)
