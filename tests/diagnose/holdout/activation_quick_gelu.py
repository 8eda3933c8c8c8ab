"""hidden_act of layer 1 became quick_gelu, x sigmoid(1.702 x), on one side."""

import torch
from transformers.models.llama.modeling_llama import LlamaMLP

from zerogap.diagnose.corpus.workshop import Workshop, turn

EXPECTED = "activation/formula"


class Quick(LlamaMLP):
    def forward(self, x):
        gate = self.gate_proj(x)
        return self.down_proj(gate * torch.sigmoid(1.702 * gate) * self.up_proj(x))


def sides(workshop: Workshop):
    return workshop.pair(lambda m: turn(m, r"1\.mlp", Quick))
