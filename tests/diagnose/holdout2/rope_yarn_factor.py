"""The attention factor of YaRN, which multiplies cosines and sines, is applied on one side only.

Met when an engine reads the rope type and its frequencies but not `attention_factor`.
"""

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop

EXPECTED = "rope/formula"


def plant(model: Model) -> None:
    model.model.rotary_emb.attention_scaling = 1.1386294361


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, family="qwen3")
