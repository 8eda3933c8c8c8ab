"""The bias of q, k and v is added after the product was rounded to BF16, and the sum rounded again.

Met between a fused epilogue and a separate addition; Qwen2 has such biases.
"""

import torch

from zerogap.diagnose.corpus.workshop import Sides, Workshop, turn

EXPECTED = "linear/rounding"


class FusedBiasLinear(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = torch.nn.functional.linear(x.float(), self.weight.float())
        return (wide + self.bias.float()).to(x.dtype)


class SeparateBiasLinear(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = torch.nn.functional.linear(x.float(), self.weight.float())
        return wide.to(x.dtype) + self.bias


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(
        lambda model: turn(model, "q_proj|k_proj|v_proj", SeparateBiasLinear),
        lambda model: turn(model, "q_proj|k_proj|v_proj", FusedBiasLinear),
        family="qwen2",
    )
