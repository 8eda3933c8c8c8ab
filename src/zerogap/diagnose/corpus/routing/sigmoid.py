"""Router scores are sigmoids of the logits, normalised over the chosen experts; the model's are a softmax.

Met when a DeepSeek-style router is taken for a Qwen model: the same experts, other weights.
"""

from typing import Any

import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "router/formula"


class SigmoidRouter(Qwen3MoeTopKRouter):
    def forward(self, hidden_states: torch.Tensor) -> Any:
        logits = torch.nn.functional.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
        best, chosen = torch.topk(torch.sigmoid(logits.float()), self.top_k, -1)
        return logits, (best / best.sum(-1, keepdim=True)).to(logits.dtype), chosen


def plant(model: Model) -> None:
    turn(model, "mlp.gate", SigmoidRouter)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, family="qwen3_moe")
