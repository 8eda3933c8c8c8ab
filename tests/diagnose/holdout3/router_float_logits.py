"""The trainer's router computes in FP32 (`moe_router_dtype: fp32`), the engine's gate in BF16.

sgl-project/sglang#40149, PrimeIntellect-ai/prime-rl#3524: near ties go to other experts, all weights move.
"""

import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "router/output"


class FloatRouter(Qwen3MoeTopKRouter):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = x.reshape(-1, self.hidden_dim)
        logits = torch.nn.functional.linear(rows.float(), self.weight.float())
        top, chosen = torch.topk(torch.softmax(logits, -1), self.top_k, -1)
        return logits, (top / top.sum(-1, keepdim=True)).to(x.dtype), chosen


def plant(model: Model) -> None:
    turn(model, "mlp.gate", FloatRouter)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(other=plant, family="qwen3_moe")
