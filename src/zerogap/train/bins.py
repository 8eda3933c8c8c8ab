"""Gradient bins: per-bin sums of weight gradients, combined by the fixed tree (adjacent pairs, an odd last one up).

Bins are filled one after the other, so the tree is folded like a binary counter: at most log2(bins) + 1 sums of all
gradients exist at any time, and one with the default of a single bin. An empty bin is +0 and is added like any other.
"""

from collections.abc import Sequence

import torch

from zerogap.ops.handle import WeightHandle
from zerogap.ops.optim import tree_add

Sums = list[torch.Tensor]


class GradientBins:
    """Collects the gradients of `handles` over `count` bins (a power of two)."""

    def __init__(self, handles: Sequence[WeightHandle], count: int) -> None:
        self._handles, self._count = list(handles), count
        self._closed = 0
        self._folded: list[tuple[int, Sums]] = []  # (bins in the subtree, sums), sizes descending

    def open(self) -> None:
        """Start the next bin from +0."""
        assert self._closed < self._count, "all bins are closed"
        for handle in self._handles:
            handle.open_grad()

    def close(self) -> None:
        """Take the open bin's sums from the handles, and fold equal subtrees."""
        sums: Sums = []
        for handle in self._handles:
            assert handle.grad is not None, f"{handle.spec.name}: no gradient bin is open"
            sums.append(_combine_leaves(handle.grad) if handle.spec.head_leaves else handle.grad)
            if handle.head_grad is not None:
                sums.append(handle.head_grad)
            handle.grad = handle.head_grad = None
        size = 1
        while self._folded and self._folded[-1][0] == size:
            _, left = self._folded.pop()
            for a, b in zip(left, sums, strict=True):
                tree_add(a, b)
            size, sums = size * 2, left
        self._folded.append((size, sums))
        self._closed += 1

    def finish(self) -> list[torch.Tensor]:
        """The FP32 gradient of each handle over all bins; a tied embedding's two parts are added here, once."""
        assert self._closed == self._count and len(self._folded) == 1, f"{self._closed} of {self._count} bins closed"
        parts = iter(self._folded[0][1])
        gradients: list[torch.Tensor] = []
        for handle in self._handles:
            gradient = next(parts)
            if handle.is_tied_head:
                tree_add(gradient, next(parts))
            gradients.append(gradient)
        return gradients


def _combine_leaves(leaves: torch.Tensor) -> torch.Tensor:
    """[L, D] -> [D] by the fixed tree."""
    level = list(leaves.unbind(0))
    while len(level) > 1:
        for left, right in zip(level[0::2], level[1::2], strict=False):
            tree_add(left, right)
        level = level[0::2]
    return level[0].clone()
