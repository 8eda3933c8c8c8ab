"""The embedding was multiplied by 8, the root of the hidden size, when the weights were converted.

Met in conversions for models that scale embeddings, applied to one that does not.
"""

import torch

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop

EXPECTED = "weights/scaled"


@torch.no_grad()
def plant(model: Model) -> None:
    model.model.embed_tokens.weight.mul_(8.0)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(
        plant,
    )
