"""The trainer computes the output head in FP32 and keeps FP32 logits; the engine's are BF16.

huggingface/trl#4303, NVIDIA-NeMo/RL#4096: the FP32 head of MiniMax and ScaleRL, switched on on one side only.
"""

import torch

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "head/output"


class FloatHead(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x.float(), self.weight.float())


def plant(model: Model) -> None:
    turn(model, "lm_head", FloatHead)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(other=plant, family="qwen2")
