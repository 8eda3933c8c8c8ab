"""The rotated part of latent queries and keys is turned by halves instead of by neighbouring pairs.

Met with DeepSeek checkpoints in stacks that ignore `rope_interleave`.
"""

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop

EXPECTED = "rope/formula"


def plant(model: Model) -> None:
    model.config.rope_interleave = False


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, family="deepseek_v3")
