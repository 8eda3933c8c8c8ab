"""Neighbouring elements are rotated as a pair (GPT-J's style) where the checkpoint pairs the two halves of a head.

Met with converted checkpoints; every key and query is rotated by the right angles, only in the wrong places.
"""

import torch

from zerogap.diagnose.corpus.open_modules import OpenAttention, Pair
from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "rope/formula"


def interleaved(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    cos, sin = cos[:, None, :, :half], sin[:, None, :, :half]
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


class InterleavedAttention(OpenAttention):
    def rotate(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Pair:
        return interleaved(q, cos, sin), interleaved(k, cos, sin)


def plant(model: Model) -> None:
    turn(model, "self_attn", InterleavedAttention)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant)
