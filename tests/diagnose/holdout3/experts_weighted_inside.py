"""The trainer multiplies by the router's weight between activation and second product, the engine after it.

Megatron Core fuses the weight into SwiGLU (`weighted_bias_swiglu_impl`): the same function, rounded at another place.
"""

import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "experts/rounding"


class WeightedInside(Qwen3MoeExperts):
    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(x)
        for expert in range(len(self.down_proj)):
            token, place = (chosen == expert).nonzero(as_tuple=True)
            if not len(token):
                continue
            gate, up = torch.nn.functional.linear(x[token], self.gate_up_proj[expert]).chunk(2, -1)
            inner = torch.nn.functional.silu(gate) * up * weights[token, place, None]
            total.index_add_(0, token, torch.nn.functional.linear(inner, self.down_proj[expert]))
        return total


def plant(model: Model) -> None:
    turn(model, "mlp.experts", WeightedInside)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(other=plant, family="qwen3_moe")
