"""Two experts of a router are almost level for some tokens; rounding noise decides differently on the two sides.

Met in every routed model between two stacks. Only log-probs, experts and margins were recorded: from these the tokens
where the choice flipped can be named, and what made the noise cannot.
"""

import dataclasses

import torch

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop
from zerogap.diagnose.side import RecordedSide, Side

EXPECTED = "routing/near_tie"
EPSILON = 2.0**-21


def near(model: Model) -> None:
    """Experts 1, 3, 5, 7 get router rows within 1e-6 of those of 0, 2, 4, 6."""
    for layer in model.model.layers:
        weight = layer.mlp.gate.weight.data
        noise = torch.randn(weight[1::2].shape, generator=torch.Generator().manual_seed(2))
        weight[1::2] = weight[0::2] * (1.0 + 1e-6 * noise)


def noisy(model: Model) -> None:
    """The same, with norms that differ in their last bits."""
    near(model)
    for layer in model.model.layers:
        layer.post_attention_layernorm.register_forward_hook(
            lambda module, args, output: output * (1.0 + EPSILON * output.sign())
        )


def recorded(side: Side) -> RecordedSide:
    first = dataclasses.replace(side.trace.recorded, boundaries={})
    return RecordedSide(dataclasses.replace(side.trace, passes=(first,)))


def sides(workshop: Workshop) -> Sides:
    a, b = workshop.pair(noisy, near, family="qwen3_moe", dtype="float32")
    return recorded(a), recorded(b)
