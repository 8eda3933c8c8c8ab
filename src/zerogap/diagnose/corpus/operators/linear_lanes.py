"""Sixteen accumulators per output, k mod 16, and a tree at the end, against one ascending chain.

Met between a vector kernel that reduces across lanes and one that keeps an output per lane.
"""

import torch

from zerogap.diagnose.corpus.arithmetic import chain_linear, lane_linear
from zerogap.diagnose.corpus.workshop import Sides, Workshop, turn

EXPECTED = "linear/order"


class ChainLinear(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return chain_linear(x, self.weight)


class LaneLinear(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return lane_linear(x, self.weight, 16)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(
        lambda model: turn(model, "q_proj|k_proj|v_proj|o_proj", LaneLinear),
        lambda model: turn(model, "q_proj|k_proj|v_proj|o_proj", ChainLinear),
        dtype="float32",
    )
