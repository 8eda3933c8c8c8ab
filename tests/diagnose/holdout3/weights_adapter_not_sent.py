"""The trainer's LoRA adapter on queries and values never reaches the engine, which samples from the base model.

verl-project/verl#7495: every sync sends the frozen base weights.
"""

import torch

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop

EXPECTED = "weights/stale"


@torch.no_grad()
def merge_adapter(model: Model) -> None:
    generator = torch.Generator().manual_seed(8)
    for layer in model.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.v_proj):
            rows, columns = projection.weight.shape
            up = torch.randn(rows, 4, generator=generator)
            down = torch.randn(4, columns, generator=generator)
            delta = 2.0 * 0.01 * (up @ down)
            projection.weight.copy_((projection.weight.float() + delta).to(projection.weight.dtype))


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(other=merge_adapter, family="qwen3")
