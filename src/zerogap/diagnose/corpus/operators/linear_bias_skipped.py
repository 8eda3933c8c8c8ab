"""The bias of one projection is loaded, and never added.

Met when a fused QKV layer was written for a family without biases; the weights of both sides are equal.
"""

import torch

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "linear/formula"


class UnbiasedLinear(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight)


def plant(model: Model) -> None:
    turn(model, "layers.1.self_attn.k_proj", UnbiasedLinear)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, family="qwen2")
