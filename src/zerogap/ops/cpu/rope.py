"""Rotary embedding kernels on tensors: the table and the rotation. Mirrors kernels/rope.h; see `zerogap.ops.rope`."""

import ctypes
from collections.abc import Sequence

import torch

from zerogap.ops.cpu.library import STORAGE, Arguments, Operation, empty, pointer, submit


class RopeTableArguments(Arguments):
    _fields_ = [
        ("rows", ctypes.c_int64),
        ("frequencies", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("half", ctypes.c_int64),
    ]


class RopeArguments(Arguments):
    _fields_ = [
        ("rows", ctypes.c_int64),
        ("q", ctypes.c_void_p),
        ("k", ctypes.c_void_p),
        ("q_out", ctypes.c_void_p),
        ("k_out", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("q_heads", ctypes.c_int64),
        ("k_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("storage", ctypes.c_int32),
        ("inverse", ctypes.c_int32),
    ]


ROPE_TABLE = Operation("rope_table", RopeTableArguments)
ROPE = Operation("rope", RopeArguments)


def rope_table(frequencies: Sequence[float], num_positions: int) -> torch.Tensor:
    """FP32 [num_positions, 2 * len(frequencies)]: cosines, then sines, of position * frequency."""
    angles = torch.tensor(frequencies, dtype=torch.float64)
    table = torch.empty(num_positions, 2 * len(frequencies))
    arguments = RopeTableArguments(
        rows=num_positions, frequencies=pointer(angles), out=pointer(table), half=len(frequencies)
    )
    submit(ROPE_TABLE, arguments, table)
    return table


def rotate(
    q: torch.Tensor, k: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, head_dim: int, *, inverse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotated q [T, Hq * D] and k [T, Hk * D] at int32 positions [T]; `inverse` turns back."""
    assert q.dtype == k.dtype and q.shape[0] == k.shape[0] == positions.shape[0], "q, k and positions must have T rows"
    assert positions.dtype == torch.int32 and table.dtype == torch.float32 and table.shape[1] == head_dim
    q_out, k_out = empty(q, q.shape[1:], q.dtype), empty(k, k.shape[1:], k.dtype)
    arguments = RopeArguments(
        rows=q.shape[0],
        q=pointer(q),
        k=pointer(k),
        q_out=pointer(q_out),
        k_out=pointer(k_out),
        positions=pointer(positions),
        table=pointer(table),
        q_heads=q.shape[1] // head_dim,
        k_heads=k.shape[1] // head_dim,
        head_dim=head_dim,
        storage=STORAGE[q.dtype],
        inverse=inverse,
    )
    submit(ROPE, arguments, q, (table,))
    return q_out, k_out
