"""Experts 0 to 7 have router rows that are equal in pairs (upcycled from a dense model); one side takes the lower index
of equal scores first, the other the higher."""

import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from zerogap.diagnose.corpus.workshop import Workshop, turn

EXPECTED = "router/tie_rule"


class Sorted(Qwen3MoeTopKRouter):
    higher = False

    def forward(self, x):
        x = x.reshape(-1, self.hidden_dim)
        logits = torch.nn.functional.linear(x, self.weight)
        scores = torch.softmax(logits.float(), -1)
        seen = scores.flip(-1) if self.higher else scores
        top, chosen = (t[:, : self.top_k] for t in torch.sort(seen, dim=-1, descending=True, stable=True))
        chosen = self.num_experts - 1 - chosen if self.higher else chosen
        return logits, (top / top.sum(-1, keepdim=True)).to(x.dtype), chosen


def change(higher):
    def apply(model):
        turn(model, "mlp.gate", Sorted, higher=higher)
        with torch.no_grad():
            for name, module in model.named_modules():
                if name.endswith("mlp.gate"):
                    module.weight[1::2] = module.weight[0::2]

    return apply


def sides(workshop: Workshop):
    return workshop.pair(change(True), change(False), family="qwen3_moe")
