"""The weight handle: one named tensor as every consumer needs it, with one place that writes it.

A matrix lives as packed panels (forward product) and, once a trainer needs input gradients, as the panels of its
transpose; an embedding lives as rows, and as panels too when it is also the head; a vector lives as itself. The panels
of an expert's matrix are views of its stack's (`ops.stack`); a matrix that is used head by head lives as rows and as
two stacks, one per part; a buffer is a vector that stays FP32 and that no gradient writes. Rollout and trainer hold the
same handle, so on one device there is one copy of the weights and an update is in place: addresses never change, and
recorded programs stay valid.

A trainable handle owns an FP32 master of the logical, unsharded tensor. What anyone computes with is the *published*
value, the master rounded to the storage dtype; `publish()` is the only way from one to the other.

A quantised matrix (`spec.fp8`) computes with E4M3 codes and block scales of its published BF16 value; panels hold the
codes. A checkpoint may bring the codes themselves: they are what is computed with until the first `publish()`, on both
sides (a master then holds their value); from then on codes are those of the published value, like every other weight's.
"""

import torch

from zerogap.errors import CheckpointError
from zerogap.ops import quant
from zerogap.ops.cpu import gemm
from zerogap.ops.cpu import quant as cpu_quant
from zerogap.ops.digest import digest
from zerogap.ops.stack import PanelStack
from zerogap.types import BlockCodes, WeightSpec

TINY = 2.0**-126  # magnitudes below are subnormal in FP32 and BF16


class WeightHandle:
    """One weight. Mutated only by `load`, `set_trainable`, `publish` (weights) and by ops' backward (`grad`).

    Attributes:
        spec, storage: what it is; torch dtype of the published value.
        stack: the stack whose views `panels`, `transposed` and `scales` are (an expert's matrix), or None.
        first, second: packed forms of the two parts of a weight of kind `heads`, one matrix [part, K] per head, in both
            directions; else None.
        panels: packed forward panels (matrix, tied embedding) or None; FP8 panels of codes where `spec.fp8`.
        transposed: packed panels for the input gradient, after `enable_input_grad()`; FP8 panels where
            `spec.fp8.gradients`, else of the published value.
        scales: FP32 block scales [ceil(N / 128), ceil(K / 128)] where `spec.fp8`, else None.
        rows: row-major published value of whatever is no plain matrix, else None.
        published: row-major published value of a quantised matrix that is not trainable; None where there is a master,
            and where a checkpoint brought codes.
        brought: True while a quantised matrix has the codes that a checkpoint brought.
        master: FP32 [shape] when trainable.
        grad: FP32 accumulator of the open gradient bin ([head_leaves, D] for query/key norm weights), else None.
        head_grad: the head part of a tied embedding's gradient, FP32 [V, H].
        anchor: scalar that requires grad when trainable, so that autograd records ops whose weights are trained.
    """

    def __init__(self, spec: WeightSpec, storage: torch.dtype, stack: PanelStack | None = None) -> None:
        """`stack`: the one that `spec.stack` names; None for a weight that stands alone."""
        self.spec, self.storage = spec, torch.float32 if spec.kind == "buffer" else storage
        self.stack = stack
        self.first: PanelStack | None = None
        self.second: PanelStack | None = None
        self.loaded = False
        self.panels: torch.Tensor | None = None
        self.transposed: torch.Tensor | None = None
        self.rows: torch.Tensor | None = None
        self.master: torch.Tensor | None = None
        self.grad: torch.Tensor | None = None
        self.head_grad: torch.Tensor | None = None
        self.anchor = torch.zeros(())
        self.scales: torch.Tensor | None = None
        self.published: torch.Tensor | None = None
        self.brought = False
        if stack is not None:
            index = stack.add(self)
            self.panels = stack.panels[index]
            self.scales = None if stack.scales is None else stack.scales[index]
            self.transposed = None if stack.transposed is None else stack.transposed[index]
        elif spec.fp8 is not None:
            assert storage == torch.bfloat16, f"{spec.name}: FP8 codes are those of BF16 values"
            width, reduce = spec.shape
            self.panels = cpu_quant.allocate_panels(width, reduce)
            self.scales = torch.ones(cpu_quant.scales_shape(width, reduce))
        elif self.is_head_or_matrix:
            width, reduce = spec.shape
            self.panels = gemm.allocate_panels(width, reduce, storage)
        if spec.kind != "matrix":
            self.rows = torch.zeros(spec.shape, dtype=self.storage)
        if spec.head_parts is not None:
            heads, first, second = spec.head_parts
            assert heads * (first + second) == spec.shape[0], f"{spec.name}: {spec.shape}, {spec.head_parts}"
            self.first, self.second = (
                PanelStack(f"{spec.name}, {part}", heads, (size, spec.shape[1]), storage)
                for part, size in (("first", first), ("second", second))
            )
            self.first.enable_input_grad()
            self.second.enable_input_grad()

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

    def load(self, tensor: torch.Tensor | BlockCodes) -> None:
        """Take over a checkpoint tensor: its value rounded to the storage dtype is published.

        Args:
            tensor: a floating-point tensor, or the codes and scales of a block-FP8 checkpoint: taken over as they are
                where this weight is quantised and has scales of that format; else by their BF16 values.

        Raises:
            CheckpointError: other shape, a dtype that is not a floating one, or codes or scales that are no numbers.
            NonFiniteError: a weight to be quantised has a NaN or an infinity.
        """
        if tuple(tensor.shape) != self.spec.shape:
            raise CheckpointError(f"{self.spec.name}: shape {tuple(tensor.shape)}, the config says {self.spec.shape}")
        if isinstance(tensor, BlockCodes):
            quant.check_block_codes(tensor, self.spec.name)
            if self.spec.fp8 is not None and quant.has_format(tensor.scales, self.spec.fp8.scale_format):
                self._write_codes(tensor)
                self.loaded = True
                return
            tensor = quant.dequantise(tensor.codes, tensor.scales)
        if not tensor.is_floating_point():
            raise CheckpointError(f"{self.spec.name}: dtype {tensor.dtype} is not a floating-point one")
        if self.master is not None:
            self.master.copy_(tensor)
            self.publish()
        else:
            if self.spec.fp8 is not None:
                self.published = tensor.to(self.storage, copy=True).contiguous()
                tensor = self.published
            self._write(tensor.to(self.storage).contiguous())
        self.loaded = True

    def value(self) -> torch.Tensor:
        """The published value, row-major [shape], storage dtype. A copy for matrices, the live tensor otherwise.

        Of codes that a checkpoint brought: their value rounded to BF16.
        """
        if self.rows is not None:
            return self.rows
        if self.spec.fp8 is not None:
            if self.master is not None:
                # Published values hold no subnormals (docs/numerics.md, "Arithmetic").
                return torch.where(self.master.abs() < TINY, self.master * 0, self.master).to(self.storage)
            if self.published is not None:
                return self.published.clone()
            stored = self.codes()
            return quant.dequantise(stored.codes, stored.scales)
        assert self.panels is not None, f"{self.spec.name} has neither rows nor panels"
        width, reduce = self.spec.shape
        return gemm.unpack(self.panels, width, reduce, self.storage)

    def codes(self) -> BlockCodes:
        """A copy of the codes and scales of a quantised matrix, row-major."""
        assert self.panels is not None and self.scales is not None, f"{self.spec.name} is not quantised"
        width, reduce = self.spec.shape
        return BlockCodes(cpu_quant.unpack_codes(self.panels, width, reduce), self.scales.clone())

    def stored(self) -> torch.Tensor | BlockCodes:
        """What a checkpoint keeps so that, loaded under this contract, it gives the same digest: the published value,
        or the codes that a checkpoint brought."""
        return self.codes() if self.brought else self.value()

    def publish(self) -> None:
        """Round the master to the storage dtype, in place, in every form that this weight has.

        Raises:
            NonFiniteError: the master of a quantised weight has a NaN or an infinity.
        """
        assert self.master is not None, f"{self.spec.name} is not trainable"
        self._write(self.master)

    def digest(self) -> str:
        """32 hex digits over what is computed with: the published value, or codes and scales."""
        if self.spec.fp8 is None:
            return digest(self.value())
        stored = self.codes()
        return digest(stored.codes, stored.scales)

    def set_trainable(self, trainable: bool) -> None:
        """Create or drop the master (whose value is the published one). Nothing that is computed with changes."""
        assert not (trainable and self.spec.kind == "buffer"), f"{self.spec.name} is a buffer: no gradient trains it"
        if trainable and self.master is None:
            self.master = self.value().to(torch.float32, copy=True)
            self.published = None
        if not trainable:
            if self.spec.fp8 is not None and self.master is not None and not self.brought:
                self.published = self.value()
            self.master = self.grad = self.head_grad = None
        self.anchor = torch.zeros((), requires_grad=trainable)

    def enable_input_grad(self) -> None:
        """Make the transposed panels that input gradients read, if this weight has panels at all; those of a stack all
        at once."""
        if self.panels is None or self.transposed is not None:
            return
        if self.stack is not None:
            self.stack.enable_input_grad()
            return
        out, reduced = self.spec.shape
        if self.spec.fp8 is not None and self.spec.fp8.gradients:
            self.bind_transposed(cpu_quant.allocate_panels(reduced, out))
        else:
            self.bind_transposed(gemm.allocate_panels(reduced, out, self.storage))

    def bind_transposed(self, panels: torch.Tensor) -> None:
        """Use these panels for input gradients, and fill them."""
        self.transposed = panels
        if self.spec.fp8 is not None and self.spec.fp8.gradients:
            cpu_quant.load_codes(self.codes().codes, None, panels)
        else:
            gemm.pack(self.value(), None, panels)

    def open_grad(self) -> None:
        """Zeroed accumulators for a gradient bin."""
        shape = (self.spec.head_leaves, *self.spec.shape) if self.spec.head_leaves else self.spec.shape
        self.grad = torch.zeros(shape)
        self.head_grad = torch.zeros(shape) if self.is_tied_head else None

    def _write(self, source: torch.Tensor) -> None:
        """`source`: row-major, FP32 master or storage dtype."""
        if self.spec.fp8 is not None:
            self._quantise(source)
        elif self.panels is not None:
            gemm.pack(source, self.panels, self.transposed)
        if self.rows is not None:
            self.rows.copy_(source)
            # Published values hold no subnormals (docs/numerics.md, "Arithmetic"); packing does the same.
            if source.dtype != self.rows.dtype:
                self.rows.masked_fill_(self.rows.abs() < TINY, 0.0)
        if self.first is not None and self.second is not None and self.rows is not None:
            size = self.first.shape[0]
            for head, part in enumerate(self.rows.view(self.first.size, -1, self.rows.shape[1])):
                self.first.pack(head, part[:size])
                self.second.pack(head, part[size:])

    def _quantise(self, source: torch.Tensor) -> None:
        fp8 = self.spec.fp8
        assert fp8 is not None and self.scales is not None
        transposed = self.transposed if fp8.gradients else None
        cpu_quant.quantise_weight(source, fp8.scale_format, self.panels, transposed, self.scales)
        quant.require_finite(self.scales, self.spec.name)
        self.brought = False
        if self.transposed is not None and not fp8.gradients:
            gemm.pack(source, None, self.transposed)

    def _write_codes(self, stored: BlockCodes) -> None:
        """Codes and scales of a checkpoint, as they are."""
        assert self.spec.fp8 is not None and self.scales is not None
        transposed = self.transposed if self.spec.fp8.gradients else None
        cpu_quant.load_codes(stored.codes.contiguous(), self.panels, transposed)
        self.scales.copy_(stored.scales)
        self.published, self.brought = None, True
        value = quant.dequantise(stored.codes, stored.scales)
        if self.master is not None:
            self.master.copy_(value)
        if self.transposed is not None and not self.spec.fp8.gradients:
            gemm.pack(value, None, self.transposed)
