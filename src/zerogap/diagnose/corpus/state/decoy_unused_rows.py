"""Embedding rows of tokens that never occur differ (a vocabulary that was padded by random rows); the cause is a fused
activation.

Met with engines that pad the vocabulary: digests differ, and it does not matter.
"""

import torch

from zerogap.diagnose.corpus.operators.activation_fused import plant
from zerogap.diagnose.corpus.workshop import VOCABULARY, Model, Sides, Workshop

EXPECTED = "activation/rounding"


def sides(workshop: Workshop) -> Sides:
    used = {int(i) for s in workshop.sequences() for i in s.ids}
    spare = [i for i in range(3, VOCABULARY) if i not in used][:8]

    def pad(model: Model) -> None:
        plant(model)
        rows = model.model.embed_tokens.weight.data
        rows[spare] = torch.randn(len(spare), rows.shape[1], generator=torch.Generator().manual_seed(7)).to(rows.dtype)

    return workshop.pair(pad)
