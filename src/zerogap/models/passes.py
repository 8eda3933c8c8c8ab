"""What a forward pass computes, read off its context: which rows belong to which sequence, and on whose side."""

from collections.abc import Iterator

from zerogap.types import ForwardContext


def runs(context: ForwardContext) -> Iterator[tuple[int, int, int]]:
    """(first row, rows, first position) of each sequence in the pass."""
    sequences = context.sequences.tolist()
    start = 0
    for row in range(1, len(sequences) + 1):
        if row == len(sequences) or sequences[row] != sequences[start]:
            yield start, row - start, int(context.positions[start])
            start = row


def of_engine(context: ForwardContext) -> bool:
    """True if the pass is none of a trainer's."""
    return context.sample_starts is None
