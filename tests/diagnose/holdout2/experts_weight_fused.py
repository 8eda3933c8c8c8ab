"""Routing weights multiply the down product's FP32 sums; the other side rounds the product to BF16 first.

Met with grouped kernels that apply the weight in their last step.
"""

import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from zerogap.diagnose.corpus.workshop import Sides, Workshop, turn

EXPECTED = "experts/rounding"


class Apart(Qwen3MoeExperts):
    fused = False

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(x)
        for expert, down in enumerate(self.down_proj):
            rows, slot = (chosen == expert).nonzero(as_tuple=True)
            gate, up = torch.nn.functional.linear(x[rows], self.gate_up_proj[expert]).chunk(2, -1)
            inner = torch.nn.functional.silu(gate) * up
            out = torch.nn.functional.linear(inner.float(), down.float())
            out = out if self.fused else out.to(x.dtype)
            total.index_add_(0, rows, (out * weights[rows, slot, None]).to(x.dtype))
        return total


class Fused(Apart):
    fused = True


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(
        lambda model: turn(model, "experts", Fused), lambda model: turn(model, "experts", Apart), family="qwen3_moe"
    )
