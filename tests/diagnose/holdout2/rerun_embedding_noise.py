"""Noise is still added to embeddings, as in noisy fine-tuning; the trainer's scoring pass forgot to switch it off.

Met with NEFTune hooks that outlive training.
"""

import torch

from zerogap.diagnose.corpus.workshop import Model, Sides, Workshop, turn

EXPECTED = "rerun/nondeterministic"
NOISE = torch.Generator().manual_seed(4)


class NoisyEmbedding(torch.nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = super().forward(ids)
        return rows + (torch.rand(rows.shape, generator=NOISE) * 2.0 - 1.0).to(rows.dtype) * 0.02


def plant(model: Model) -> None:
    turn(model, "embed_tokens", NoisyEmbedding)


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(plant, family="qwen3")
