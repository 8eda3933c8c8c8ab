"""The engine multiplies the norm's weight in FP32 and rounds once; the trainer rounds before the weight.

Llama rounds first, Gemma last, and kernels shared by both pick one: huggingface/transformers#29402,
InternLM/lmdeploy#2842. Here in Qwen3, so that the norms of heads are concerned as well.
"""

import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "norm/rounding"


class FloatWeight(Qwen3RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight.float() * normed).to(x.dtype)


def plant(model: Model) -> None:
    turn(model, r"\w*norm", FloatWeight)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, family="qwen3", facts={"num_layers": 3})
