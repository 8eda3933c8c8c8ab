"""Stacks of packed matrices: what a grouped product reads as one tensor, group by group.

The experts of one layer and projection are separate weights by name, load, master and digest, and one tensor to the
kernel that multiplies each row with its own expert's matrix: a handle's packed panels, FP8 scales and the panels of its
transpose are views of the stack's. The two parts of a weight that is used head by head are stacks, too.
"""

from typing import TYPE_CHECKING

import torch

from zerogap.ops.cpu import gemm, memory
from zerogap.ops.cpu import quant as cpu_quant
from zerogap.types import FP8Blocks

if TYPE_CHECKING:
    from zerogap.ops.handle import WeightHandle


class PanelStack:
    """E matrices of one shape [N, K] in packed form. Mutated by its handles, by `pack` and by `enable_input_grad`.

    Attributes:
        name, size, shape, storage, fp8: E is `size`; `storage` is the dtype of the published values.
        panels: forward panels, [E, *panels of N x K]; FP8 panels of codes where `fp8`.
        transposed: panels for the input gradient, [E, *panels of K x N], after `enable_input_grad()`; FP8 panels where
            `fp8.gradients`, else of the published values.
        scales: FP32 [E, ceil(N / 128), ceil(K / 128)] where `fp8`, else None.
    """

    def __init__(
        self, name: str, size: int, shape: tuple[int, int], storage: torch.dtype, fp8: FP8Blocks | None = None
    ) -> None:
        assert fp8 is None or storage == torch.bfloat16, f"{name}: FP8 codes are those of BF16 values"
        self.name, self.size, self.shape, self.storage, self.fp8 = name, size, shape, storage, fp8
        self.panels = memory.zeros((size, *packed_shape(shape, storage, fp8 is not None)), packed_dtype(storage, fp8))
        self.transposed: torch.Tensor | None = None
        self.scales = None if fp8 is None else torch.ones((size, *cpu_quant.scales_shape(*shape)))
        self._handles: dict[int, WeightHandle] = {}

    @property
    def handles(self) -> list["WeightHandle"]:
        """The weights whose packed form this is, in index order."""
        assert len(self._handles) in (0, self.size), f"{self.name}: {len(self._handles)} of {self.size} weights"
        return [self._handles[i] for i in range(len(self._handles))]

    def add(self, handle: "WeightHandle") -> int:
        """Make room for a weight that says in its spec that it stands here; returns its index."""
        assert handle.spec.stack is not None, f"{handle.spec.name} stands in no stack, not in {self.name}"
        name, index, size = handle.spec.stack
        theirs = (name, size, handle.spec.shape, handle.storage, handle.spec.fp8)
        ours = (self.name, self.size, self.shape, self.storage, self.fp8)
        assert theirs == ours, f"{handle.spec.name} belongs to the stack {theirs}, not to {ours}"
        assert 0 <= index < size and index not in self._handles, f"{handle.spec.name}: place {index} of {self.name}"
        self._handles[index] = handle
        return index

    def enable_input_grad(self) -> None:
        """Make the panels that input gradients read, of all matrices at once."""
        if self.transposed is not None:
            return
        coded = self.fp8 is not None and self.fp8.gradients
        shape = packed_shape(self.shape[::-1], self.storage, coded)
        self.transposed = memory.zeros((self.size, *shape), torch.uint8 if coded else self.storage)
        for index, handle in self._handles.items():
            handle.bind_transposed(self.transposed[index])

    def pack(self, index: int, source: torch.Tensor) -> None:
        """Write matrix `index`, row-major [N, K], FP32 (rounded) or storage dtype, in every form; not for FP8."""
        assert self.fp8 is None, f"{self.name}: codes are written by their handles"
        gemm.pack(source, self.panels[index], None if self.transposed is None else self.transposed[index])


def packed_dtype(storage: torch.dtype, fp8: FP8Blocks | None) -> torch.dtype:
    """Dtype of a weight's forward panels."""
    return storage if fp8 is None else torch.uint8


def packed_shape(shape: tuple[int, ...], storage: torch.dtype, coded: bool) -> tuple[int, ...]:
    """Shape of the panels of a matrix [N, K]; `coded`: they hold FP8 codes."""
    width, reduce = shape
    return cpu_quant.panels_shape(width, reduce) if coded else gemm.panels_shape(width, reduce, storage)
