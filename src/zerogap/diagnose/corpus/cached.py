"""Sequences computed in two parts over a KV cache, so that the first part can be wrong as a stale cache is."""

from typing import Any

import numpy as np
import torch
import transformers

from zerogap.diagnose.adapters.logprobs import defined_logprobs
from zerogap.diagnose.trace import Definition, SequenceTrace


@torch.no_grad()
def continued(
    model: Any,
    sequence: SequenceTrace,
    hit: int,
    *,
    writer: Any = None,
    written: np.ndarray | None = None,
    first_position: int | None = None,
) -> np.ndarray:
    """Log-probs of a sequence whose first `hit` tokens' keys and values were in a cache.

    Args:
        model: computes what is not cached.
        hit: tokens taken from the cache.
        writer: the model that wrote the cache; None: `model`.
        written: the tokens that the cache was written for; None: the sequence's own.
        first_position: position of the first token after the hit; None: `hit`.

    Returns:
        float32 [N], NaN up to the first token after the hit.
    """
    ids = torch.from_numpy(sequence.ids.astype(np.int64))[None]
    before = ids[:, :hit] if written is None else torch.from_numpy(written[:hit].astype(np.int64))[None]
    cache = transformers.DynamicCache(config=model.config)
    (writer or model)(input_ids=before, cache=cache, use_cache=True)
    start = hit if first_position is None else first_position
    positions = torch.arange(start, start + ids.shape[1] - hit)[None]
    logits = model(input_ids=ids[:, hit:], position_ids=positions, cache=cache, use_cache=True).logits[0]
    rows = torch.cat([torch.zeros(hit, logits.shape[1], dtype=logits.dtype), logits])
    found = defined_logprobs(sequence.ids, rows, Definition(1.0, True))
    found[: hit + 1] = np.nan
    return found
