"""Experts' products take FP8 operands; the other side computes them in BF16.

Met with FP8 checkpoints of routed models, whose experts alone are quantised at load time.
"""

import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from zerogap.diagnose.corpus.arithmetic import quantised, quantised_rows
from zerogap.diagnose.corpus.experts import expert_outputs
from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "experts/operands"


def block_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(quantised_rows(x), quantised(weight, 128, 128)).to(x.dtype)


class FP8Experts(Qwen3MoeExperts):
    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(x)
        for token, update in expert_outputs(self, x, chosen, weights, linear=block_linear):
            total.index_add_(0, token, update.to(total.dtype))
        return total


def plant(model: Model) -> None:
    turn(model, "mlp.experts", FP8Experts)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, family="qwen3_moe")
