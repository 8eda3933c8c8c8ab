"""The mean square of a row is added up by 32 lanes and a tree, against one running sum.

Met between a warp's shuffle reduction and a serial CPU loop.
"""

import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from zerogap.diagnose.corpus.arithmetic import chain, halving
from zerogap.diagnose.corpus.workshop import Sides, Workshop, turn

EXPECTED = "norm/order"


def normed(norm: LlamaRMSNorm, x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    mean = total[..., None] / x.shape[-1]
    return norm.weight * (x.float() * torch.rsqrt(mean + norm.variance_epsilon)).to(x.dtype)


class SerialNorm(LlamaRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return normed(self, x, chain(x.float().pow(2).unbind(-1)))


class WarpNorm(LlamaRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        squares = x.float().pow(2)
        lanes = [chain(squares[..., lane::32].unbind(-1)) for lane in range(32)]
        return normed(self, x, halving(torch.stack(lanes, -1)))


def sides(workshop: Workshop) -> Sides:
    names = "input_layernorm|post_attention_layernorm|norm"
    return workshop.pair(
        lambda model: turn(model, names, WarpNorm), lambda model: turn(model, names, SerialNorm), dtype="float32"
    )
