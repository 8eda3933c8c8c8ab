"""A model whose head is its embedding: the engine holds the head as a tensor of its own, which updates leave behind.

vllm-project/vllm#51665, PrimeIntellect-ai/prime-rl#2823: only `embed_tokens` is sent; the state dict has one name.
"""

import torch

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop

EXPECTED = "weights/tied"


@torch.no_grad()
def update(model: Model) -> None:
    generator = torch.Generator().manual_seed(31)
    for parameter in model.parameters():
        step = 0.02 * torch.randn(parameter.shape, generator=generator)
        parameter.copy_((parameter.float() * (1.0 + step)).to(parameter.dtype))


def update_without_head(model: Model) -> None:
    old = model.lm_head.weight.detach().clone()
    update(model)
    model.lm_head.weight = torch.nn.Parameter(old)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(update_without_head, update, family="qwen2", facts={"tied": True})
