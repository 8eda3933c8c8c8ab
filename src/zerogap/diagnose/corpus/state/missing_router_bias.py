"""The router's correction bias is zeros: the checkpoint's buffer was not loaded.

Met in loaders that go through `named_parameters`.
"""

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop

EXPECTED = "buffers/missing"


def plant(model: Model) -> None:
    model.model.layers[1].mlp.gate.e_score_correction_bias.zero_()


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, family="deepseek_v3")
