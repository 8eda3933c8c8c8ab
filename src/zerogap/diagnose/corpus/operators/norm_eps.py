"""Epsilon 1e-6 instead of the config's 1e-5: a default that a port forgot to read from config.json.

Met where a Llama is loaded through a Qwen class, or the other way round; in FP32 every element moves.
"""

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop

EXPECTED = "norm/formula"


def plant(model: Model) -> None:
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 1e-6


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, dtype="float32")
