"""Known tokens through the engine's own pages, without drawing any: for scoring and for checks of parity.

The same decoder, cache, chunks and prefix cache as in generation, run op by op instead of as a recorded program,
because here every row may be an output.
"""

from collections.abc import Iterator

import numpy as np
import torch

from zerogap.errors import CapacityError
from zerogap.rollout.scheduler import Scheduler
from zerogap.rollout.sequence import Request, Sequence
from zerogap.types import ForwardContext, SamplingKey, SamplingParams


def prefill_chunks(
    scheduler: Scheduler, ids: np.ndarray, first: int, chunk_tokens: int
) -> Iterator[tuple[torch.Tensor, ForwardContext]]:
    """Forward passes to run, in order, over int32 ids [T]; pages are held until the iterator ends or is closed.

    Args:
        first: outputs are the rows from this position on; the tokens before it may come from the prefix cache.
        chunk_tokens: tokens of one pass.

    Yields:
        int64 ids of the chunk and its context; `output_rows` may be empty.

    Raises:
        CapacityError: running sequences hold too many pages.
    """
    pool = scheduler.pool
    pages = scheduler.find_prefix(
        Sequence.of(-1, Request(ids[: first + 1], SamplingParams(max_tokens=1), SamplingKey(), frozenset()))
    )
    start = len(pages) * pool.page_size
    needed = -(-len(ids) // pool.page_size) - len(pages)
    try:
        if needed > pool.available:
            raise CapacityError(
                f"{needed} more pages are needed and {pool.available} are not held: let requests finish"
            )
        pages.extend(page for page in (pool.take() for _ in range(needed)) if page is not None)
        page_table = torch.tensor([pages], dtype=torch.int32)
        while start < len(ids):
            end = min(start + chunk_tokens, len(ids))
            context = ForwardContext(
                positions=torch.arange(start, end, dtype=torch.int32),
                sequences=torch.zeros(end - start, dtype=torch.int32),
                page_table=page_table,
                page_size=pool.page_size,
                output_rows=torch.arange(min(max(first - start, 0), end - start), end - start, dtype=torch.int64),
            )
            yield torch.from_numpy(ids[start:end].astype(np.int64)), context
            start = end
    finally:
        scheduler.give_back(pages)
