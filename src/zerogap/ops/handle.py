"""The weight handle: one named tensor as every consumer needs it, with one place that writes it.

A matrix lives as packed panels (forward product) and, once a trainer needs input gradients, as the panels of its
transpose; an embedding lives as rows, and as panels too when it is also the head; a vector lives as itself. Rollout and
trainer hold the same handle, so on one device there is one copy of the weights and an update is in place: addresses
never change, and recorded programs stay valid.

A trainable handle owns an FP32 master of the logical, unsharded tensor. What anyone computes with is the *published*
value, the master rounded to the storage dtype; `publish()` is the only way from one to the other.
"""

import torch

from zerogap.errors import CheckpointError
from zerogap.ops.cpu import gemm
from zerogap.ops.digest import digest
from zerogap.types import WeightSpec


class WeightHandle:
    """One weight. Mutated only by `load`, `set_trainable`, `publish` (weights) and by ops' backward (`grad`).

    Attributes:
        spec, storage: what it is; torch dtype of the published value.
        panels: packed forward panels (matrix, tied embedding) or None.
        transposed: packed panels for the input gradient, after `enable_input_grad()`.
        rows: row-major published value of a vector or an embedding, else None.
        master: FP32 [shape] when trainable.
        grad: FP32 accumulator of the open gradient bin ([head_leaves, D] for query/key norm weights), else None.
        head_grad: the head part of a tied embedding's gradient, FP32 [V, H].
        anchor: scalar that requires grad when trainable, so that autograd records ops whose weights are trained.
    """

    def __init__(self, spec: WeightSpec, storage: torch.dtype) -> None:
        self.spec, self.storage = spec, storage
        self.loaded = False
        self.panels: torch.Tensor | None = None
        self.transposed: torch.Tensor | None = None
        self.rows: torch.Tensor | None = None
        self.master: torch.Tensor | None = None
        self.grad: torch.Tensor | None = None
        self.head_grad: torch.Tensor | None = None
        self.anchor = torch.zeros(())
        if self.is_head_or_matrix:
            width, reduce = spec.shape
            self.panels = gemm.allocate_panels(width, reduce, storage)
        if spec.kind != "matrix":
            self.rows = torch.zeros(spec.shape, dtype=storage)

    @property
    def is_tied_head(self) -> bool:
        """True for an embedding that is the head too."""
        return self.spec.kind == "embedding" and self.spec.out_leaf_size > 0

    @property
    def is_head_or_matrix(self) -> bool:
        return self.spec.kind == "matrix" or self.is_tied_head

    @property
    def trainable(self) -> bool:
        return self.master is not None

    def load(self, tensor: torch.Tensor) -> None:
        """Take over a checkpoint tensor: its value rounded to the storage dtype is published.

        Raises:
            CheckpointError: other shape, or a dtype that is not a floating one.
        """
        if tuple(tensor.shape) != self.spec.shape:
            raise CheckpointError(f"{self.spec.name}: shape {tuple(tensor.shape)}, the config says {self.spec.shape}")
        if not tensor.is_floating_point():
            raise CheckpointError(f"{self.spec.name}: dtype {tensor.dtype} is not a floating-point one")
        if self.master is not None:
            self.master.copy_(tensor)
            self.publish()
        else:
            self._write(tensor.to(self.storage).contiguous())
        self.loaded = True

    def value(self) -> torch.Tensor:
        """The published value, row-major [shape], storage dtype. A copy for matrices, the live tensor otherwise."""
        if self.rows is not None:
            return self.rows
        assert self.panels is not None, f"{self.spec.name} has neither rows nor panels"
        width, reduce = self.spec.shape
        return gemm.unpack(self.panels, width, reduce, self.storage)

    def publish(self) -> None:
        """Round the master to the storage dtype, in place, in every form that this weight has."""
        assert self.master is not None, f"{self.spec.name} is not trainable"
        self._write(self.master)

    def digest(self) -> str:
        """32 hex digits over the published value."""
        return digest(self.value())

    def set_trainable(self, trainable: bool) -> None:
        """Create or drop the master (whose value is the published one)."""
        if trainable and self.master is None:
            self.master = self.value().to(torch.float32, copy=True)
        if not trainable:
            self.master = self.grad = self.head_grad = None
        self.anchor = torch.zeros((), requires_grad=trainable)

    def enable_input_grad(self) -> None:
        """Make the transposed panels that input gradients read, if this weight has panels at all."""
        if self.panels is not None and self.transposed is None:
            out, reduced = self.spec.shape
            self.transposed = gemm.allocate_panels(reduced, out, self.storage)
            gemm.pack(self.value(), None, self.transposed)

    def open_grad(self) -> None:
        """Zeroed accumulators for a gradient bin."""
        shape = (self.spec.head_leaves, *self.spec.shape) if self.spec.head_leaves else self.spec.shape
        self.grad = torch.zeros(shape)
        self.head_grad = torch.zeros(shape) if self.is_tied_head else None

    def _write(self, source: torch.Tensor) -> None:
        """`source`: row-major, FP32 master or storage dtype."""
        if self.panels is not None:
            gemm.pack(source, self.panels, self.transposed)
        if self.rows is not None:
            self.rows.copy_(source)
            # Published values hold no subnormals (docs/numerics.md, "Arithmetic"); packing does the same.
            if source.dtype != self.rows.dtype:
                self.rows.masked_fill_(self.rows.abs() < 2.0**-126, 0.0)
