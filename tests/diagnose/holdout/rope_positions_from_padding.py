"""Positions count from the start of a prompt padded by 17 (TRL's forward, where no position_ids are passed): every
rotation is 17 steps off on one side."""

from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from zerogap.diagnose.corpus.workshop import Workshop, turn

EXPECTED = "rope/positions"


class Late(LlamaRotaryEmbedding):
    def forward(self, x, position_ids):
        return super().forward(x, position_ids + 17)


def sides(workshop: Workshop):
    return workshop.pair(lambda m: turn(m, "rotary_emb", Late))
