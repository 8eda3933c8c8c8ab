"""The residual stream is kept in FP32 between the layers of a BF16 model.

Met as `residual_in_fp32` of some trainers, against engines that keep it in BF16.
"""

import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from zerogap.diagnose.corpus.open_modules import OpenLayer
from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

# The stream is accumulated in FP32, which is the same as: its sums are not rounded to BF16.
EXPECTED = ("residual/accumulate", "residual/rounding")


class WideLayer(OpenLayer):
    def add(self, residual: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        return residual.float() + update.float()


class NarrowingNorm(LlamaRMSNorm):
    """Reads FP32 rows, hands BF16 ones to the products, and rounds where transformers does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * normed(x, self.variance_epsilon).to(self.weight.dtype)


def normed(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)


def plant(model: Model) -> None:
    turn(model, r"layers\.\d", WideLayer)
    turn(model, "input_layernorm|post_attention_layernorm|norm", NarrowingNorm)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant)
