"""Router logits are rounded to BF16; the other side keeps them FP32 over the same BF16 operands.

Met between transformers, where the router is a linear layer of the model's dtype, and engines that route in FP32.
"""

from typing import Any

import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from zerogap.diagnose.corpus.workshop import Sides, Workshop, turn

EXPECTED = "router/output"


class WideRouter(Qwen3MoeTopKRouter):
    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x.float(), self.weight.float())

    def forward(self, hidden_states: torch.Tensor) -> Any:
        logits = self.logits(hidden_states.reshape(-1, self.hidden_dim))
        best, chosen = torch.topk(torch.softmax(logits.float(), -1), self.top_k, -1)
        return logits, (best / best.sum(-1, keepdim=True)).to(hidden_states.dtype), chosen


class NarrowRouter(WideRouter):
    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return super().logits(x).to(torch.bfloat16)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(
        lambda model: turn(model, "mlp.gate", NarrowRouter),
        lambda model: turn(model, "mlp.gate", WideRouter),
        family="qwen3_moe",
    )
