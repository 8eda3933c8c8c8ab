"""FP32 weights are trained, and the router's arrive in BF16.

PrimeIntellect-ai/prime-rl#3524: the transfer casts everything to the wire's dtype, the FP32 router too.
"""

import torch

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop

EXPECTED = "weights/dtype"


@torch.no_grad()
def downcast(model: Model) -> None:
    for layer in model.model.layers:
        layer.mlp.gate.weight.copy_(layer.mlp.gate.weight.to(torch.bfloat16).float())


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(downcast, family="qwen3_moe", dtype="float32")
