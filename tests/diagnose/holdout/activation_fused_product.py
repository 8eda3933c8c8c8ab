"""A fused kernel multiplies SiLU(gate) and up in FP32 and rounds once; the other side rounds SiLU first."""

import torch
from transformers.models.llama.modeling_llama import LlamaMLP

from zerogap.diagnose.corpus.workshop import Workshop, turn

EXPECTED = "activation/rounding"


class Fused(LlamaMLP):
    def forward(self, x):
        inner = torch.nn.functional.silu(self.gate_proj(x).float()) * self.up_proj(x).float()
        return self.down_proj(inner.to(x.dtype))


def sides(workshop: Workshop):
    return workshop.pair(lambda m: turn(m, "mlp", Fused))
