"""Rows of q are in the interleaved order that another format's RoPE wants.

Met with GGUF conversions, whose Llama files hold permuted q and k.
"""

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop

EXPECTED = "weights/permuted"


def plant(model: Model) -> None:
    for layer in model.model.layers:
        weight = layer.self_attn.q_proj.weight
        heads = model.config.num_attention_heads
        weight.data = weight.data.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant)
