"""Router weights are not normalised to sum to one, though the config says `norm_topk_prob`.

Met in engines whose default is False, with configs that leave the key out.
"""

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop

EXPECTED = "router/formula"


def plant(model: Model) -> None:
    for layer in model.model.layers:
        layer.mlp.gate.norm_topk_prob = False


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, family="qwen3_moe")
