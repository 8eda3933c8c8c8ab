"""The biases of one layer's keys were not loaded: they are zeros.

Met with Qwen2 checkpoints in loaders made for Llama.
"""

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop

EXPECTED = "weights/missing"


def plant(model: Model) -> None:
    model.model.layers[0].self_attn.k_proj.bias.data.zero_()


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, family="qwen2")
