"""Both sides compute in FP8 blocks; the engine rounds activation scales up to powers of two, the trainer does not.

Met on Blackwell, where DeepGEMM wants UE8M0 scales (vLLM's VLLM_USE_DEEP_GEMM_E8M0) and the trainer's recipe has FP32.
"""

import torch

from zerogap.diagnose.corpus.arithmetic import quantised, quantised_rows
from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "linear/scale"


class BlockLinear(torch.nn.Linear):
    power_of_two: bool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = quantised_rows(x, power_of_two=self.power_of_two)
        weight = quantised(self.weight, 128, 128)
        return torch.nn.functional.linear(rows, weight).to(x.dtype).view(*x.shape[:-1], -1)


def rounded_up(model: Model) -> None:
    turn(model, r"\w+_proj", BlockLinear, power_of_two=True)


def usual(model: Model) -> None:
    turn(model, r"\w+_proj", BlockLinear, power_of_two=False)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(rounded_up, usual)
