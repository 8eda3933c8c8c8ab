"""The map of a walk: which boundaries differ at which token positions, small enough to be looked at."""

from collections.abc import Mapping, Sequence

import torch

from zerogap.diagnose.findings import Heat

COLUMNS = 64


def heat_of(distance: Mapping[str, torch.Tensor], lengths: Sequence[int], columns: int = COLUMNS) -> Heat | None:
    """Gather rows by their position in the sequence; None where nothing is compared.

    Args:
        distance: node -> [R] largest |x - y| of the row over its largest magnitude, in running order of the nodes; NaN
            where the row was not recorded, 0 where no bit differs.
        lengths: rows of each sequence.
        columns: at most this many; one column holds as many positions as that takes.
    """
    if not distance or not lengths or not max(lengths):
        return None
    width = -(-max(lengths) // columns)
    positions = torch.cat([torch.arange(n) for n in lengths]) // width
    count = int(positions.max()) + 1
    shares, largest = [], []
    for rows in distance.values():
        share: list[float | None] = []
        most: list[float | None] = []
        for column in range(count):
            cell = rows[(positions == column) & ~rows.isnan()]
            share.append(float((cell != 0).double().mean()) if len(cell) else None)
            most.append(float(cell.max()) if len(cell) else None)
        shares.append(tuple(share))
        largest.append(tuple(most))
    return Heat(tuple(distance), tuple(range(0, count * width, width)), tuple(shares), tuple(largest))
