"""Sliding window of 9 keys on both sides; one counts the query's own position, the other does not (flash-attn's
window_size is w - 1)."""

import torch

from zerogap.diagnose.corpus.arithmetic import eager
from zerogap.diagnose.corpus.workshop import Workshop, attend

EXPECTED = "attention/mask"


def windowed(keys):
    def function(query, key, value, mask, scale):
        rows, columns = query.shape[2], key.shape[2]
        at = torch.arange(columns - rows, columns)[:, None]
        hidden = torch.arange(columns)[None] <= at - keys
        if mask is None:
            mask = torch.zeros(1, 1, rows, columns, dtype=query.dtype)
        mask = mask.masked_fill(hidden, torch.finfo(query.dtype).min)
        return eager(query, key, value, mask, scale)

    return function


def sides(workshop: Workshop):
    return workshop.pair(
        lambda m: attend(m, "ext_window10", windowed(10)), lambda m: attend(m, "ext_window9", windowed(9))
    )
