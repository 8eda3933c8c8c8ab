"""The sum of squares runs in one ascending chain instead of the library's vector lanes.

Met between a CPU or Triton kernel with one accumulator and a vectorised one; visible in FP32.
"""

import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from zerogap.diagnose.corpus.arithmetic import chain
from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "norm/order"


class ChainNorm(LlamaRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        squares = x.float().pow(2)
        mean = chain(squares.unbind(-1))[..., None] / x.shape[-1]
        return self.weight * (x.float() * torch.rsqrt(mean + self.variance_epsilon)).to(x.dtype)


def plant(model: Model) -> None:
    turn(model, "input_layernorm|post_attention_layernorm|norm", ChainNorm)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, dtype="float32")
