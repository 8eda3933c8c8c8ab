"""The softmax has one more term of exp(0), a sink that no value belongs to.

Met when a stack for models with attention sinks adds its default sink to a model that has none.
"""

from typing import Any

import torch

from zerogap.diagnose.corpus.arithmetic import grouped
from zerogap.diagnose.corpus.workshop import Sides, Workshop, attend

EXPECTED = "attention/formula"


def sunk(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scale: float) -> torch.Tensor:
    key, value = grouped(key, query), grouped(value, query)
    scores = torch.matmul(query, key.transpose(2, 3)) * scale + mask
    scores = torch.cat([scores, torch.zeros_like(scores[..., :1])], -1)
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(value.dtype)[..., :-1]
    return torch.matmul(weights, value).transpose(1, 2).contiguous()


def sides(workshop: Workshop) -> Sides:
    return workshop.pair(
        lambda model: attend(model, "sunk", sunk),
    )
