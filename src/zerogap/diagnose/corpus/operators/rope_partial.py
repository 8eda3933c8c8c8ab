"""Only the first half of each head is rotated.

Met when `partial_rotary_factor` of another model's config is applied.
"""

import torch

from zerogap.diagnose.corpus.open_modules import OpenAttention, Pair
from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "rope/formula"


class PartialAttention(OpenAttention):
    def rotate(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Pair:
        size = q.shape[-1] // 2
        cos, sin = (torch.cat((t[..., : size // 2], t[..., : size // 2]), -1) for t in (cos, sin))
        rotated = super().rotate(q[..., :size], k[..., :size], cos, sin)
        return torch.cat((rotated[0], q[..., size:]), -1), torch.cat((rotated[1], k[..., size:]), -1)


def plant(model: Model) -> None:
    turn(model, "layers.1.self_attn", PartialAttention)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant)
