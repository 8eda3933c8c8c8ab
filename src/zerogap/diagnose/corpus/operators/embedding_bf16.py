"""Embeddings of an FP32 model leave the layer rounded to BF16.

Met under autocast with a custom embedding; all that follows is FP32.
"""

import torch

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "embedding/output"


class NarrowEmbedding(torch.nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids).bfloat16().float()


def plant(model: Model) -> None:
    turn(model, "embed_tokens", NarrowEmbedding)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, dtype="float32")
