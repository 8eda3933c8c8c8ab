"""The fixed buffers that a step's program reads: token ids, positions, page table, rows that go to the head.

Buffers have the capacity of the largest step and never move, so one recorded program serves every step; a step fills
the first T rows (tokens) and the first R rows (outputs) and says how many there are.
"""

from collections.abc import Sequence as List

import numpy as np
import torch

from zerogap.rollout.scheduler import Chunk
from zerogap.rollout.sequence import Sequence
from zerogap.routing import RoutingRecord
from zerogap.types import ForwardContext


class BatchBuffers:
    """Inputs of one forward pass. Written by `fill` and, for the page table, by the scheduler.

    Attributes:
        ids: int64 [T], T = `max_batch_tokens` rows at most.
        positions, sequences: int32 [T] absolute position, and row of the page table.
        output_rows: int64 [R], R = `max_outputs` rows at most; rows whose next token is drawn.
        page_table: int32 [max_sequences, max_pages].
        routing: what the routers of the T rows choose, where that is recorded; written by the forward pass.
    """

    def __init__(
        self,
        max_batch_tokens: int,
        max_sequences: int,
        max_pages: int,
        page_size: int,
        routing: RoutingRecord | None = None,
        max_outputs: int | None = None,
    ) -> None:
        """`max_outputs`: one per sequence by default."""
        self.page_size, self.routing = page_size, routing
        self.ids = torch.zeros(max_batch_tokens, dtype=torch.int64)
        self.positions = torch.zeros(max_batch_tokens, dtype=torch.int32)
        self.sequences = torch.zeros(max_batch_tokens, dtype=torch.int32)
        self.output_rows = torch.zeros(max_outputs or max_sequences, dtype=torch.int64)
        self.page_table = torch.zeros((max_sequences, max_pages), dtype=torch.int32)
        self._views = [t.numpy() for t in (self.ids, self.positions, self.sequences, self.output_rows)]
        self._ascending = np.arange(max_pages * page_size, dtype=np.int32)

    def fill(self, chunks: List[Chunk]) -> tuple[int, list[tuple[Sequence, int]]]:
        """Lay the chunks one after the other.

        Returns:
            T, and for each of the R output rows the sequence that draws, and the token's position in the completion.
            A sequence has as many rows as it has guesses in this step, and one.
        """
        ids, positions, sequences, output_rows = self._views
        row = 0
        drawing: list[tuple[Sequence, int]] = []
        for sequence, start, count, drafts in chunks:
            end = row + count
            ids[row:end] = sequence.ids[start : start + count]
            positions[row:end] = self._ascending[start : start + count]
            sequences[row:end] = sequence.slot
            if start + count - drafts == sequence.length:
                for ahead in range(drafts + 1):
                    output_rows[len(drawing)] = end - 1 - drafts + ahead
                    drawing.append((sequence, sequence.num_drawn + ahead))
            row = end
        return row, drawing

    def context(self, num_tokens: int | None = None, num_outputs: int | None = None) -> ForwardContext:
        """The context over the first rows of the buffers; None: over their whole capacity."""
        return ForwardContext(
            positions=self.positions[:num_tokens],
            sequences=self.sequences[:num_tokens],
            page_table=self.page_table,
            page_size=self.page_size,
            output_rows=self.output_rows[:num_outputs],
            routing=self.routing,
        )
