"""Two experts per token instead of three.

Met with serving options that override `num_experts_per_tok`.
"""

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop

EXPECTED = "router/formula"


def plant(model: Model) -> None:
    for layer in model.model.layers:
        layer.mlp.gate.top_k = 2


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, family="qwen3_moe")
