"""Experts 0 to 3 and 4 to 7 are summed apart and the two sums added, as on two ranks; no layout was recorded.

Met with expert parallelism in the engine alone.
"""

import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from zerogap.diagnose.corpus.experts import expert_outputs
from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = ("experts/split", "layout/ranks")


class Planted(Qwen3MoeExperts):
    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        halves = [torch.zeros_like(x), torch.zeros_like(x)]
        for half, total in enumerate(halves):
            mine = torch.where(chosen // 4 == half, chosen, -1)
            for rows, out in expert_outputs(self, x, mine, weights):
                total.index_add_(0, rows, out)
        return halves[0] + halves[1]


def plant(model: Model) -> None:
    turn(model, r"experts", Planted)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, family="qwen3_moe", dtype="bfloat16")
