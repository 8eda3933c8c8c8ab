"""Norms of the latent keys and values use the epsilon of the config; the other side keeps the module's default of 1e-6.

Met in latent attention, where some stacks do not pass the config's epsilon on.
"""

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop

EXPECTED = "norm/formula"


def plant(model: Model) -> None:
    for layer in model.model.layers:
        layer.self_attn.kv_a_layernorm.variance_epsilon = 1e-5


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, family="deepseek_v3", dtype="float32")
