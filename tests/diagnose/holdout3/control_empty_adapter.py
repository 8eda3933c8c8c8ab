"""A LoRA adapter as it starts, with B = 0, is merged on one side only. Nothing differs."""

import torch

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop

EXPECTED = "clean"


@torch.no_grad()
def merge(model: Model) -> None:
    generator = torch.Generator().manual_seed(4)
    for layer in model.model.layers:
        weight = layer.self_attn.v_proj.weight
        delta = torch.zeros(weight.shape[0], 4) @ torch.randn(4, weight.shape[1], generator=generator)
        weight.copy_((weight.float() + 2.0 * delta).to(weight.dtype))


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(merge, family="qwen3_moe")
