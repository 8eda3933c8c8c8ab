"""The rollout computes its projections in FP8 (128 x 128 weight blocks, 1 x 128 activations), the trainer in BF16.

NeMo RL's recipe "FP8 rollout only"; the BF16 weights themselves are the same on both sides, and are quantised on the
way into the product.
"""

import torch

from zerogap.diagnose.corpus.arithmetic import quantised, quantised_rows
from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "linear/operands"


class BlockLinear(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, weight = quantised_rows(x), quantised(self.weight, 128, 128)
        return torch.nn.functional.linear(rows, weight).to(x.dtype).view(*x.shape[:-1], -1)


def plant(model: Model) -> None:
    turn(model, r"\w+_proj", BlockLinear)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, family="qwen3", facts={"hidden_size": 128, "intermediate_size": 256})
