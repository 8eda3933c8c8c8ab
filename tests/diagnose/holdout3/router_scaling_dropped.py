"""The engine leaves `routed_scaling_factor` 2.5 out.

sgl-project/sglang#31449: the factor was not applied after the weights had been renormalised.
"""

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop

EXPECTED = "router/scale"


def unscaled(model: Model) -> None:
    for layer in model.model.layers[1:]:
        layer.mlp.gate.routed_scaling_factor = 1.0


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(unscaled, family="deepseek_v3", facts={"num_layers": 3})
