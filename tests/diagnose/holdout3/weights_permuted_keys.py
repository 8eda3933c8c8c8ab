"""The converter turns the rows of `k_proj` from one rotary layout to the other, though they are in the right one.

ggml-org/llama.cpp#2376, huggingface/transformers#31788: with grouped queries the permutation of the keys needs the
number of key heads, and took that of the query heads.
"""

import torch

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop

EXPECTED = "weights/permuted"


@torch.no_grad()
def plant(model: Model) -> None:
    heads, groups = model.config.num_attention_heads, model.config.num_key_value_heads
    for layer in model.model.layers:
        weight = layer.self_attn.k_proj.weight
        size = weight.shape[0] // groups
        back = weight.view(groups, 2, size // 2, -1).transpose(1, 2).reshape(weight.shape)  # as the file has them
        half = weight.shape[0] // heads // 2
        layer.self_attn.k_proj.weight.copy_(back.view(heads, half, 2, -1).transpose(1, 2).reshape(weight.shape))


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, dtype="float32")
