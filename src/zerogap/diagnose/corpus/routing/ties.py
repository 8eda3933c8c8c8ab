"""Between experts with equal logits one side takes the lower index, the other the higher.

Met with two sorts; experts become equal when they are copied from one dense MLP (upcycling), and their router rows too.
"""

from typing import Any

import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "router/tie_rule"


class LowerFirst(Qwen3MoeTopKRouter):
    def forward(self, hidden_states: torch.Tensor) -> Any:
        logits = torch.nn.functional.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
        probabilities = torch.softmax(logits.float(), -1)
        chosen = self.ordered(probabilities)[:, : self.top_k]
        weights = probabilities.gather(-1, chosen)
        return logits, (weights / weights.sum(-1, keepdim=True)).to(logits.dtype), chosen

    def ordered(self, probabilities: torch.Tensor) -> torch.Tensor:
        return torch.sort(probabilities, dim=-1, descending=True, stable=True).indices


class HigherFirst(LowerFirst):
    def ordered(self, probabilities: torch.Tensor) -> torch.Tensor:
        return self.num_experts - 1 - super().ordered(probabilities.flip(-1))


def tie(model: Model) -> None:
    """Router rows of experts 0 and 1, 2 and 3, ... become equal; the experts stay what they are."""
    for layer in model.model.layers:
        layer.mlp.gate.weight.data[1::2] = layer.mlp.gate.weight.data[0::2]


def lower(model: Model) -> None:
    tie(model)
    turn(model, "mlp.gate", LowerFirst)


def higher(model: Model) -> None:
    tie(model)
    turn(model, "mlp.gate", HigherFirst)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(higher, lower, family="qwen3_moe")
