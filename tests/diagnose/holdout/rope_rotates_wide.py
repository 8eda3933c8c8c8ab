"""One side rotates in FP32 and rounds once, the other rounds each product and the sum to BF16 (prime-rl PR 1167)."""

from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from zerogap.diagnose.corpus.open_modules import OpenAttention
from zerogap.diagnose.corpus.workshop import Workshop, turn

EXPECTED = "rope/rounding"


class Wide(OpenAttention):
    def rotate(self, q, k, cos, sin):
        wide = apply_rotary_pos_emb(q.float(), k.float(), cos.float(), sin.float())
        return wide[0].to(q.dtype), wide[1].to(k.dtype)


def sides(workshop: Workshop):
    return workshop.pair(lambda m: turn(m, "self_attn", Wide))
