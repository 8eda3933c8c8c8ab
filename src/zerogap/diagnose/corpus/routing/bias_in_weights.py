"""The correction bias, which is for choosing only, is part of the experts' weights too.

Met in first ports of DeepSeek-V3: scores are gathered after the bias was added.
"""

from typing import Any

import torch
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "router/formula"


class BiasedRouter(DeepseekV3TopkRouter):
    def forward(self, hidden_states: torch.Tensor) -> Any:
        logits, _, chosen = super().forward(hidden_states)
        weights = (logits.sigmoid() + self.e_score_correction_bias).gather(1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return logits, weights * self.routed_scaling_factor, chosen


def plant(model: Model) -> None:
    turn(model, "mlp.gate", BiasedRouter)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, family="deepseek_v3")
