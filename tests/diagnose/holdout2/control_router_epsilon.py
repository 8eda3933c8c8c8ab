"""A harmless difference: routing weights are normalised by their sum plus 1e-20, which no FP32 sum can feel.

Met between model files of routed models.
"""

from typing import Any

import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "clean"


class PaddedRouter(Qwen3MoeTopKRouter):
    def forward(self, x: torch.Tensor) -> Any:
        logits = torch.nn.functional.linear(x.reshape(-1, self.hidden_dim), self.weight)
        weights, chosen = torch.softmax(logits, -1, dtype=torch.float32).topk(self.top_k, -1)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return logits, weights.to(logits.dtype), chosen


def plant(model: Model) -> None:
    turn(model, "gate", PaddedRouter)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, family="qwen3_moe")
