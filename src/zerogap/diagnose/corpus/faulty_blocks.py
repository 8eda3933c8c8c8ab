"""Decoder blocks of zerogap that are wrong in chosen rows of chosen passes: corruption outside of any operator.

The real block runs over the real kernels; then the first element of chosen rows of its update is disturbed.
"""

import dataclasses
from collections.abc import Callable

import torch

from zerogap.models.decoder import Decoder
from zerogap.types import ForwardContext

Rows = Callable[[ForwardContext], list[int]]


@dataclasses.dataclass(frozen=True)
class FaultyBlock:
    """A block that disturbs the first element of chosen output rows."""

    block: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    rows: Rows

    def __call__(self, *args: object) -> tuple[torch.Tensor, torch.Tensor]:
        residual, update = self.block(*args)
        context = args[-1]
        assert isinstance(context, ForwardContext), "the context is a block's last argument"
        update = update.detach().clone()
        for row in self.rows(context):
            update[row, 0] += 1.0 + update[row, 0].abs()
        return residual, update


def disturbed(decoder: Decoder, rows: Rows) -> Decoder:
    """The decoder with a first block that disturbs some rows."""
    decoder.blocks = [FaultyBlock(decoder.blocks[0], rows), *decoder.blocks[1:]]  # type: ignore[list-item]
    return decoder
