"""The rotation's second product is fused into the addition: one rounding fewer.

Met when a compiler contracts the rotation in one kernel and not in the other.
"""

import torch
from transformers.models.llama.modeling_llama import rotate_half

from zerogap.diagnose.corpus.arithmetic import fma
from zerogap.diagnose.corpus.open_modules import OpenAttention, Pair
from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "rope/primitive"


class FusedAttention(OpenAttention):
    def rotate(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Pair:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return tuple(fma(rotate_half(x), sin.expand_as(x), x * cos) for x in (q, k))  # type: ignore[return-value]


def plant(model: Model) -> None:
    turn(model, "self_attn", FusedAttention)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, dtype="float32")
