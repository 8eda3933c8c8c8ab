"""Only the first half of each head is rotated, by the frequencies of a head of that size.

Met when `partial_rotary_factor` of another model's config is applied.
"""

import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from zerogap.diagnose.corpus.open_modules import OpenAttention, Pair
from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "rope/formula"


class HalfRotary(LlamaRotaryEmbedding):
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Pair:
        size = len(self.inv_freq)  # half of a head
        frequencies = 10000.0 ** -(torch.arange(0, size, 2).float() / size)
        angles = position_ids[..., None].float() * frequencies
        angles = torch.cat((angles, angles), -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class PartialAttention(OpenAttention):
    def rotate(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Pair:
        size = cos.shape[-1]
        rotated = super().rotate(q[..., :size], k[..., :size], cos, sin)
        return torch.cat((rotated[0], q[..., size:]), -1), torch.cat((rotated[1], k[..., size:]), -1)


def plant(model: Model) -> None:
    turn(model, "rotary_emb", HalfRotary)
    turn(model, "self_attn", PartialAttention)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant)
