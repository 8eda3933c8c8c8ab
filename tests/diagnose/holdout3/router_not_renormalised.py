"""The trainer does not renormalise the weights of the chosen experts, although the config says `norm_topk_prob`.

pytorch/torchtitan#1448: a DeepSeek checkpoint trained with the raw sigmoid scores.
"""

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop

EXPECTED = "router/formula"


def raw_scores(model: Model) -> None:
    for layer in model.model.layers[1:]:
        layer.mlp.gate.norm_topk_prob = False


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(other=raw_scores, family="deepseek_v3")
