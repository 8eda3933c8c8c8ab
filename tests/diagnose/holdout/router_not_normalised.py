"""norm_topk_prob is lost on one side: the chosen experts' weights do not sum to 1 (Qwen3-MoE conversions)."""

from zerogap.diagnose.corpus.workshop import Workshop

EXPECTED = "router/formula"


def lose(model):
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.norm_topk_prob = False


def sides(workshop: Workshop):
    return workshop.pair(lose, family="qwen3_moe")
