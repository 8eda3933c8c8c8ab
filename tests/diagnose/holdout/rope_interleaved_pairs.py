"""GPT-J style rotation (pairs of neighbours) where the weights are for NeoX style (halves): vLLM's is_neox_style,
Megatron's rotary_interleaved."""

import torch

from zerogap.diagnose.corpus.open_modules import OpenAttention
from zerogap.diagnose.corpus.workshop import Workshop, turn

EXPECTED = "rope/formula"


class Interleaved(OpenAttention):
    def rotate(self, q, k, cos, sin):
        half = cos.shape[-1] // 2
        c, s = (t[..., :half].repeat_interleave(2, -1).unsqueeze(1) for t in (cos, sin))

        def turned(x):
            other = torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)
            return x * c + other * s

        return turned(q), turned(k)


def sides(workshop: Workshop):
    return workshop.pair(lambda m: turn(m, "self_attn", Interleaved))
