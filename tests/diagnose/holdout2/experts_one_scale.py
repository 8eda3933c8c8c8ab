"""Gate and up weights of an FP8 expert share the larger of their two scales on one side.

Met in engines that fuse the two tensors, each of which came with a scale.
"""

import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from zerogap.diagnose.corpus.arithmetic import quantised, quantised_rows
from zerogap.diagnose.corpus.experts import expert_outputs
from zerogap.diagnose.corpus.workshop import Change, Model, Sides, Workshop, turn

EXPECTED = ("experts/scale", "experts/block")


class Quantised(Qwen3MoeExperts):
    fused = False

    def product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        parts = weight.chunk(2) if len(weight) == 2 * self.intermediate_dim and not self.fused else (weight,)
        codes = torch.cat([quantised(part, 0, 0) for part in parts])
        return torch.nn.functional.linear(quantised_rows(x, 0), codes).to(x.dtype)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(x)
        for rows, out in expert_outputs(self, x, chosen, weights, linear=self.product):
            total.index_add_(0, rows, out)
        return total


class Fused(Quantised):
    fused = True


@torch.no_grad()
def apart(model: Model) -> None:
    """Up weights three times as large as gate weights, so that the two scales differ."""
    for layer in model.model.layers:
        layer.mlp.experts.gate_up_proj[:, 32:] *= 3.0


def planted(kind: type) -> Change:
    def plant(model: Model) -> None:
        apart(model)
        turn(model, "experts", kind)

    return plant


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(planted(Fused), planted(Quantised), family="qwen3_moe")
