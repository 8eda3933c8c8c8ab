"""The router of an FP32 model reads BF16-rounded rows and weights.

Met under autocast, which also takes the router.
"""

from typing import Any

import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "router/operands"


class CastRouter(Qwen3MoeTopKRouter):
    def forward(self, hidden_states: torch.Tensor) -> Any:
        rows = hidden_states.reshape(-1, self.hidden_dim).bfloat16().float()
        logits = torch.nn.functional.linear(rows, self.weight.bfloat16().float())
        best, chosen = torch.topk(torch.softmax(logits, -1), self.top_k, -1)
        return logits, best / best.sum(-1, keepdim=True), chosen


def plant(model: Model) -> None:
    turn(model, "mlp.gate", CastRouter)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, family="qwen3_moe", dtype="float32")
