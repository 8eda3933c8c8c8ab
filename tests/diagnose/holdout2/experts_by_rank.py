"""The chosen experts' outputs are added in the order of their weights, the largest first, instead of by expert.

Met with kernels that sum over the slots of the routing table.
"""

import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from zerogap.diagnose.corpus.arithmetic import chain
from zerogap.diagnose.corpus.experts import expert_outputs
from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "experts/order"


class Planted(Qwen3MoeExperts):
    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        slots = x.new_zeros(*chosen.shape, x.shape[-1])
        for slot in range(chosen.shape[1]):
            part = expert_outputs(self, x, chosen[:, slot, None], weights[:, slot, None])
            for rows, out in part:
                slots[rows, slot] = out
        return chain(slots.unbind(1), x.dtype)


def plant(model: Model) -> None:
    turn(model, r"experts", Planted)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, family="qwen3_moe", dtype="bfloat16")
