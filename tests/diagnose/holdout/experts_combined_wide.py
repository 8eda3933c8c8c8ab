"""A fused MoE kernel adds the experts' weighted outputs in FP32 and rounds once; the other side adds into a BF16
tensor.
"""

import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from zerogap.diagnose.corpus.experts import expert_outputs
from zerogap.diagnose.corpus.workshop import Workshop, turn

EXPECTED = "experts/accumulate"


class Wide(Qwen3MoeExperts):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        total = torch.zeros_like(hidden_states, dtype=torch.float32)
        for token, out in expert_outputs(self, hidden_states, top_k_index, top_k_weights):
            total.index_add_(0, token, out.float())
        return total.to(hidden_states.dtype)


def sides(workshop: Workshop):
    return workshop.pair(lambda m: turn(m, "experts", Wide), family="qwen3_moe")
