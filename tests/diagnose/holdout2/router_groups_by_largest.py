"""Expert groups are ranked by their best expert instead of by the sum of their best two.

Met between DeepSeek V2's and V3's group-limited routing.
"""

from typing import Any

import torch
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "router/formula"


class LargestRouter(DeepseekV3TopkRouter):
    def forward(self, x: torch.Tensor) -> Any:
        x = x.view(-1, self.hidden_dim)
        logits = torch.nn.functional.linear(x.float(), self.weight.float())
        scores = logits.sigmoid()
        biased = (scores + self.e_score_correction_bias).view(len(x), self.num_group, -1)
        groups = biased.amax(-1).topk(self.topk_group, -1).indices
        kept = torch.zeros(len(x), self.num_group, dtype=torch.bool).scatter(1, groups, True)
        chosen = biased.masked_fill(~kept[..., None], -torch.inf).flatten(1).topk(self.top_k, -1).indices
        weights = scores.gather(1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return logits, weights * self.routed_scaling_factor, chosen


def plant(model: Model) -> None:
    turn(model, "gate", LargestRouter)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, family="deepseek_v3")
