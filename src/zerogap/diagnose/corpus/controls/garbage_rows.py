"""Padded columns hold other ids, and so all kinds of numbers, in every layer; masked, they reach no real row."""

import torch

from zerogap.diagnose.corpus.open_modules import ExactNorm, exact
from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "clean"


class NoisyEmbedding(torch.nn.Embedding):
    """Rows of the padding id 0 are large and different in every call."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out = super().forward(ids)
        noise = 100.0 * torch.randn(out.shape)
        return torch.where(ids[..., None] == 0, noise.to(out.dtype), out)


def plant(model: Model) -> None:
    exact(model)
    turn(model, "embed_tokens", NoisyEmbedding)
    turn(model, "norm", ExactNorm)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, exact, batches=((0, 1, 2, 3),))
