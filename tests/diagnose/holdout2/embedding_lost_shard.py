"""Ids of the second half of the vocabulary are looked up as zeros: the sum over ranks was left out.

Met with vocabulary-parallel embeddings.
"""

import torch

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "embedding/formula"


class HalfEmbedding(torch.nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * (ids < self.num_embeddings // 2)[..., None]


def plant(model: Model) -> None:
    turn(model, r"embed_tokens", HalfEmbedding)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(
        plant,
    )
