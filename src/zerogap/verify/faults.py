"""Planted faults, one per check of the ladder: each makes the real code path wrong in the way that its check is for.

`zerogap verify --inject NAME` shows that a check can fail. The check a fault belongs to is the first to turn red; a
later check may follow only where it contains the faulty path. Faults 1 to 6 sit in the first decoder block and look at
the forward context, as a kernel that depends on batch, packing, side, chunking, decoding or paging would; the other two
change what is exported or logged.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from zerogap.errors import ConfigError
from zerogap.layers.block import Block
from zerogap.ops import tap
from zerogap.types import ForwardContext, Sample
from zerogap.verify.checks import NamedTensor, Subject

RowChooser = Callable[[ForwardContext], list[int]]


@dataclasses.dataclass(frozen=True)
class Fault:
    """A planted fault.

    Attributes:
        name, check: what the command line calls it, and the check that must turn red first.
        text: what is wrong, for `--list-faults`.
        follow: later checks that contain the faulty path and may turn red too.
        rows: for faults in a block: the rows whose output is disturbed, from the forward context.
    """

    name: str
    check: int
    text: str
    follow: tuple[int, ...] = ()
    rows: RowChooser | None = None


def _runs(context: ForwardContext) -> Iterator[tuple[int, int, int]]:
    """(first row, rows, first position) of each sequence in the pass."""
    sequences = context.sequences.tolist()
    start = 0
    for row in range(1, len(sequences) + 1):
        if row == len(sequences) or sequences[row] != sequences[start]:
            yield start, row - start, int(context.positions[start])
            start = row


def _is_engine(context: ForwardContext) -> bool:
    return context.sample_starts is None


def _many_packs(context: ForwardContext) -> list[int]:
    several = context.pack_starts is not None and len(context.pack_starts) > 2
    return context.pack_starts[:-1].tolist() if several else []  # type: ignore[index]


def _packed_neighbours(context: ForwardContext) -> list[int]:
    if context.sample_starts is None or context.pack_starts is None:
        return []
    return sorted(set(context.sample_starts.tolist()) - set(context.pack_starts.tolist()))


def _engine_rows(context: ForwardContext) -> list[int]:
    return list(range(len(context.positions))) if _is_engine(context) else []


def _continued_chunks(context: ForwardContext) -> list[int]:
    return [row for row, count, at in _runs(context) if _is_engine(context) and count > 1 and at > 0]


def _decode_rows(context: ForwardContext) -> list[int]:
    return [row for row, count, at in _runs(context) if _is_engine(context) and count == 1 and at > 0]


def _large_pages(context: ForwardContext) -> list[int]:
    return list(range(len(context.positions))) if _is_engine(context) and context.page_size > 16 else []


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("batch-size", 1, "a result depends on how many packs one pass computes", (8, 10), _many_packs),
        Fault("packing", 2, "a sample sees its neighbour in the pack", (8, 10), _packed_neighbours),
        Fault("other-side", 3, "the engine computes a block differently from the trainer", (8, 10), _engine_rows),
        Fault("chunk-border", 4, "the first row after a chunk border is wrong", (6, 8, 10), _continued_chunks),
        Fault("decode-row", 5, "a row decoded alone differs from the same row in a prefill", (6, 8, 10), _decode_rows),
        Fault("page-size", 6, "results depend on the page size of the cache", (8,), _large_pages),
        Fault("stale-weight", 8, "one tensor of the export is not the updated one"),
        Fault("stale-scales", 8, "the KV scales of the export are not those of its weights (calibrated only)"),
        Fault("log-shift", 10, "the log-prob logged for a token is its neighbour's"),
    )
}


def fault(name: str) -> Fault:
    """The named fault.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in FAULTS:
        raise ConfigError("inject", name, f"choose one of {', '.join(FAULTS)}")
    return FAULTS[name]


@dataclasses.dataclass(frozen=True)
class FaultyBlock:
    """A decoder block that disturbs the first element of chosen output rows."""

    block: Block
    rows: RowChooser

    def __call__(self, *args: object) -> tuple[torch.Tensor, torch.Tensor]:
        residual, update = self.block(*args)  # type: ignore[arg-type]
        context = args[-1]
        assert isinstance(context, ForwardContext), "the context is a block's last argument"
        for row in self.rows(context):
            update.detach()[row, 0] += 1.0 + update.detach()[row, 0].abs()
        return residual, update


@contextmanager
def planted(fault: Fault, subject: Subject) -> Iterator[Subject]:
    """The subject with the fault in it, inside the block. Passes run op by op there (no recorded programs)."""
    blocks = subject.decoder.blocks
    faulty = subject
    if fault.rows is not None:
        subject.decoder.blocks = [FaultyBlock(blocks[0], fault.rows), *blocks[1:]]  # type: ignore[list-item]
    elif fault.name == "stale-weight":
        faulty = dataclasses.replace(subject, reload=_stale)
    elif fault.name == "stale-scales":
        if not subject.decoder.calibrated:
            raise ConfigError("inject", fault.name, "only numerics.kv_scale: calibrated has a scale set")
        faulty = dataclasses.replace(subject, rescale=_rescaled)
    elif fault.name == "log-shift":
        faulty = dataclasses.replace(subject, logged=_shifted)
    try:
        with tap.listen(lambda name, outputs, info: None):
            yield faulty
    finally:
        subject.decoder.blocks = blocks


def _stale(tensors: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
    for name, tensor in tensors:
        if name == "model.norm.weight" and isinstance(tensor, torch.Tensor):
            tensor = tensor.clone()
            tensor[0] += 1.0
        yield name, tensor


def _rescaled(scales: list) -> list:
    scales[0][0][0] *= 1.5
    return scales


def _shifted(samples: list[Sample]) -> list[Sample]:
    return [dataclasses.replace(s, logprobs=np.roll(s.logprobs, 1)) for s in samples]
