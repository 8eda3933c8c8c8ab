"""Scores of latent attention are scaled by the unrotated part of a head alone: 1/sqrt(32) for 1/sqrt(48).

Met in ports of latent attention that take the head size from `qk_nope_head_dim`.
"""

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop

EXPECTED = "attention/scale"


def plant(model: Model) -> None:
    for layer in model.model.layers:
        layer.self_attn.scaling = layer.self_attn.qk_nope_head_dim**-0.5


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, family="deepseek_v3")
