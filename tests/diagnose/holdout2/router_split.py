"""The router's product cuts K in four parts; the other side takes it whole, all in FP32.

Met with router kernels that use split-K for few experts.
"""

from typing import Any

import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from zerogap.diagnose.corpus.arithmetic import split_linear
from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "router/split"


class SplitRouter(Qwen3MoeTopKRouter):
    def forward(self, x: torch.Tensor) -> Any:
        logits = split_linear(x.reshape(-1, self.hidden_dim), self.weight, 4)
        weights, chosen = torch.softmax(logits, -1, dtype=torch.float32).topk(self.top_k, -1)
        return logits, weights / weights.sum(-1, keepdim=True), chosen


def plant(model: Model) -> None:
    turn(model, "gate", SplitRouter)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, family="qwen3_moe", dtype="float32")
