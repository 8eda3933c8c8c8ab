"""One pass over known tokens with an unscaled cache, to learn how large keys and values get (ops/kv_scales.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from zerogap.errors import ConfigError
from zerogap.models.cache import plain_codec
from zerogap.ops.kv_scales import Calibration
from zerogap.types import ForwardContext

if TYPE_CHECKING:
    from zerogap.models.decoder import Decoder

PAGE_SIZE = 64
MAX_TOKENS = 1024


def calibration_pass(decoder: Decoder, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Largest magnitudes FP32 [layers, kinds, groups] over the first `MAX_TOKENS` tokens of all prompts together.

    Raises:
        ConfigError: there is no token.
    """
    rows: list[np.ndarray] = []
    left = MAX_TOKENS
    for prompt in prompts:
        ids = np.asarray(prompt[: min(left, decoder.max_positions)], np.int64)
        if len(ids):
            rows.append(ids)
            left -= len(ids)
        if not left:
            break
    if not rows:
        raise ConfigError("prompts", [], "calibration needs at least one token")
    lengths = [len(ids) for ids in rows]
    pages = [-(-length // PAGE_SIZE) for length in lengths]
    table = np.zeros((len(rows), max(pages)), np.int32)
    for i, count in enumerate(pages):
        table[i, :count] = np.arange(count) + sum(pages[:i])
    context = ForwardContext(
        positions=torch.from_numpy(np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])),
        sequences=torch.from_numpy(np.repeat(np.arange(len(rows), dtype=np.int32), lengths)),
        page_table=torch.from_numpy(table),
        page_size=PAGE_SIZE,
        output_rows=torch.zeros(1, dtype=torch.int64),
    )
    spec = decoder.spec
    codec = plain_codec(spec, decoder.numerics)
    calibration = Calibration(spec.num_layers, codec.scale_shape)
    layers = decoder.scratch_kv(codec.allocate(sum(pages), PAGE_SIZE), calibration=calibration)
    with torch.no_grad():
        decoder.hidden(torch.from_numpy(np.concatenate(rows)), context, layers)
    return calibration.amax
