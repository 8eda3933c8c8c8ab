"""Megatron's moe-router-dtype fp32: one side keeps router logits in FP32, the other rounds them to BF16."""

import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from zerogap.diagnose.corpus.workshop import Workshop, turn

EXPECTED = "router/output"


class Wide(Qwen3MoeTopKRouter):
    def forward(self, x):
        x = x.reshape(-1, self.hidden_dim)
        logits = torch.nn.functional.linear(x.float(), self.weight.float())
        top, chosen = torch.topk(torch.softmax(logits, -1), self.top_k, -1)
        top = top / top.sum(-1, keepdim=True)
        return logits, top.to(x.dtype), chosen


def sides(workshop: Workshop):
    return workshop.pair(lambda m: turn(m, "mlp.gate", Wide), family="qwen3_moe")
