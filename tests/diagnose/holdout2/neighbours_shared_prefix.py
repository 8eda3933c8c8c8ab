"""Everyone in a pass reads the first four keys and values of the first sequence: a shared prefix where there is none.

Met with cascade attention that counts too long a common prefix.
"""

from typing import Any

import torch

from zerogap.diagnose.corpus.arithmetic import exact_attention
from zerogap.diagnose.corpus.open_modules import exact
from zerogap.diagnose.corpus.workshop import Sides, Workshop, attend

EXPECTED = "neighbours/content"


def cascade(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scale: float) -> torch.Tensor:
    key, value = key.clone(), value.clone()
    key[1:, :, :4], value[1:, :, :4] = key[:1, :, :4], value[:1, :, :4]
    return exact_attention(query, key, value, mask, scale)


def sides(workshop: Workshop) -> Sides:
    a, b = workshop.model(), workshop.model()
    exact(a)
    exact(b)
    attend(b, "cascade", cascade)
    return workshop.torch_side(a, name="trainer"), workshop.torch_side(b, name="engine", batches=((0, 1, 2, 3),))
