"""Rotary embedding kernels on tensors: the table and the rotation. Mirrors kernels/rope.h; see `zerogap.ops.rope`."""

import ctypes
import dataclasses
from collections.abc import Sequence

import torch

from zerogap.ops.cpu.library import STORAGE, Arguments, Operation, empty, pointer, submit


class RopeTableArguments(Arguments):
    _fields_ = [
        ("rows", ctypes.c_int64),
        ("frequencies", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("half", ctypes.c_int64),
        ("factor", ctypes.c_double),
    ]


class Turned(ctypes.Structure):
    """Mirror of `zg::Turned` (kernels/rope.h)."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("heads", ctypes.c_int64),
        ("row_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("out_row_stride", ctypes.c_int64),
        ("out_head_stride", ctypes.c_int64),
    ]


class RopeArguments(Arguments):
    _fields_ = [
        ("rows", ctypes.c_int64),
        ("parts", Turned * 2),
        ("positions", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("head_dim", ctypes.c_int64),
        ("storage", ctypes.c_int32),
        ("inverse", ctypes.c_int32),
        ("interleaved", ctypes.c_int32),
    ]


ROPE_TABLE = Operation("rope_table", RopeTableArguments)
ROPE = Operation("rope", RopeArguments)


def rope_table(frequencies: Sequence[float], num_positions: int, factor: float = 1.0) -> torch.Tensor:
    """FP32 [num_positions, 2 * len(frequencies)]: cosines, then sines, of position * frequency, times `factor`."""
    angles = torch.tensor(frequencies, dtype=torch.float64)
    table = torch.empty(num_positions, 2 * len(frequencies))
    arguments = RopeTableArguments(
        rows=num_positions, frequencies=pointer(angles), out=pointer(table), half=len(frequencies), factor=factor
    )
    submit(ROPE_TABLE, arguments, table)
    return table


@dataclasses.dataclass(frozen=True)
class HeadColumns:
    """Where heads stand in a tensor's rows: head h is columns offset + h * stride .. + head_dim of [T, ...]."""

    tensor: torch.Tensor
    offset: int
    stride: int


def rotate(
    q: torch.Tensor,
    k: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    head_dim: int,
    *,
    inverse: bool,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotated q [T, Hq * D] and k [T, Hk * D] at int32 positions [T]; `inverse` turns back."""
    assert q.dtype == k.dtype and q.shape[0] == k.shape[0], "q and k must have T rows of one dtype"
    outs = empty(q, q.shape[1:], q.dtype), empty(k, k.shape[1:], k.dtype)
    parts = [
        (HeadColumns(x, 0, head_dim), HeadColumns(out, 0, head_dim), x.shape[1] // head_dim)
        for x, out in zip((q, k), outs, strict=True)
    ]
    rotate_heads(parts, table, positions, head_dim, inverse=inverse, interleaved=interleaved)
    return outs


def rotate_heads(
    parts: Sequence[tuple[HeadColumns, HeadColumns, int]],
    table: torch.Tensor,
    positions: torch.Tensor,
    head_dim: int,
    *,
    inverse: bool,
    interleaved: bool = False,
) -> None:
    """Rotate heads that stand among other columns, as latent attention has them; other columns are not touched.

    Args:
        parts: one or two of (from where, to where, number of heads); a head may be rotated in place.
        table: FP32 [P, D].
        positions: int32 [T].
        head_dim: D.
    """
    assert positions.dtype == torch.int32 and table.dtype == torch.float32 and table.shape[1] == head_dim
    first = parts[0][0].tensor
    arguments = RopeArguments(
        rows=first.shape[0],
        positions=pointer(positions),
        table=pointer(table),
        head_dim=head_dim,
        storage=STORAGE[first.dtype],
        inverse=inverse,
        interleaved=interleaved,
    )
    for part, (source, target, heads) in zip(arguments.parts, parts, strict=False):
        for columns in (source, target):
            width = columns.tensor[0].numel() if columns.tensor.shape[0] else 0
            last = columns.offset + (heads - 1) * columns.stride + head_dim
            assert not width or last <= width, f"{heads} heads reach column {last} of {width}"
            assert columns.tensor.dtype == first.dtype, f"one dtype, not {columns.tensor.dtype} and {first.dtype}"
            assert columns.tensor.shape[0] == positions.shape[0], "every tensor must have the positions' T rows"
        size = first.element_size()
        part.x, part.out = ((pointer(c.tensor) or 0) + c.offset * size for c in (source, target))
        part.row_stride, part.out_row_stride = (c.tensor.stride(0) for c in (source, target))
        part.heads, part.head_stride, part.out_head_stride = heads, source.stride, target.stride
    submit(ROPE, arguments, first, (table,))
