"""FP8 activations are E5M2 on one side and E4M3 on the other, with the same scales but for the largest code.

Met with hybrid FP8 recipes whose format for gradients ends up in the forward pass.
"""

import torch

from zerogap.diagnose.corpus.arithmetic import quantised
from zerogap.diagnose.corpus.workshop import Sides, Workshop, turn

EXPECTED = "linear/operands"


class Narrow(torch.nn.Linear):
    codes, largest = torch.float8_e4m3fn, 448.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / self.largest
        rows = (x.float() / scale).clamp(-self.largest, self.largest).to(self.codes).float() * scale
        return torch.nn.functional.linear(rows, quantised(self.weight, 128, 128)).to(x.dtype)


class WideRange(Narrow):
    codes, largest = torch.float8_e5m2, 57344.0


def sides(workshop: Workshop) -> Sides:
    names = "gate_proj|up_proj|down_proj"
    return workshop.pair(
        lambda model: turn(model, names, WideRange), lambda model: turn(model, names, Narrow), family="qwen3"
    )
