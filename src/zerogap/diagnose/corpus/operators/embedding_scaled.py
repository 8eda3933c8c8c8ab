"""Embeddings are multiplied by sqrt(hidden), as Gemma's are.

Met when a shared embedding layer has a flag that another family sets.
"""

import math

import torch

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "embedding/formula"


class ScaledEmbedding(torch.nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * math.sqrt(self.embedding_dim)


def plant(model: Model) -> None:
    turn(model, "embed_tokens", ScaledEmbedding)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant)
