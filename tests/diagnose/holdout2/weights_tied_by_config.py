"""One side ties the head to the embedding; the checkpoint has a head of its own.

Met when `tie_word_embeddings` is lost on the way and falls back to true.
"""

import torch

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop

EXPECTED = "weights/tied"


@torch.no_grad()
def plant(model: Model) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, family="qwen3")
