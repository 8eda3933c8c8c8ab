"""Experts' weights stay FP32 for the multiplication; the model rounds them to BF16 first.

Met between the eager model and engines that pass FP32 router weights to the expert kernel.
"""

from typing import Any

import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

# What the router hands out is FP32 instead of rounded to BF16.
EXPECTED = ("router/rounding", "router/output")


class WideWeights(Qwen3MoeTopKRouter):
    def forward(self, hidden_states: torch.Tensor) -> Any:
        logits = torch.nn.functional.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
        best, chosen = torch.topk(torch.softmax(logits, -1, dtype=torch.float32), self.top_k, -1)
        return logits, best / best.sum(-1, keepdim=True), chosen


def plant(model: Model) -> None:
    turn(model, "mlp.gate", WideWeights)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, family="qwen3_moe")
