"""Under autocast the FP32 residual stream is cast to BF16 before the norm reads it.

Met with FP32 trainers whose fused norm kernel takes 16-bit inputs only.
"""

import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "norm/operands"


class NarrowNorm(LlamaRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:

        return super().forward(x.bfloat16().float())


def plant(model: Model) -> None:
    turn(model, r"input_layernorm|post_attention_layernorm", NarrowNorm)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, dtype="float32")
