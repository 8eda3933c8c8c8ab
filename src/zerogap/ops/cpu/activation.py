"""SiLU(gate) * up kernels on tensors. Mirrors kernels/activation.h; see `zerogap.ops.activation`."""

import ctypes

import torch

from zerogap.ops.cpu.library import STORAGE, Arguments, Operation, empty, pointer, submit


class SiluMulArguments(Arguments):
    _fields_ = [
        ("rows", ctypes.c_int64),
        ("gate", ctypes.c_void_p),
        ("up", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("width", ctypes.c_int64),
        ("storage", ctypes.c_int32),
    ]


class SiluMulGradArguments(Arguments):
    _fields_ = [
        ("rows", ctypes.c_int64),
        ("gate", ctypes.c_void_p),
        ("up", ctypes.c_void_p),
        ("d_out", ctypes.c_void_p),
        ("d_gate", ctypes.c_void_p),
        ("d_up", ctypes.c_void_p),
        ("width", ctypes.c_int64),
        ("storage", ctypes.c_int32),
    ]


SILU_MUL = Operation("silu_mul", SiluMulArguments)
SILU_MUL_GRAD = Operation("silu_mul_grad", SiluMulGradArguments)


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """SiLU(gate) * up, all [T, F]."""
    assert gate.shape == up.shape and gate.dtype == up.dtype, "gate and up must be alike"
    out = empty(gate, gate.shape[1:], gate.dtype)
    arguments = SiluMulArguments(
        rows=gate.shape[0],
        gate=pointer(gate),
        up=pointer(up),
        out=pointer(out),
        width=gate.shape[1],
        storage=STORAGE[gate.dtype],
    )
    submit(SILU_MUL, arguments, gate)
    return out


def silu_mul_grad(gate: torch.Tensor, up: torch.Tensor, d_out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of gate and up, [T, F] each."""
    d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
    arguments = SiluMulGradArguments(
        rows=gate.shape[0],
        gate=pointer(gate),
        up=pointer(up),
        d_out=pointer(d_out),
        d_gate=pointer(d_gate),
        d_up=pointer(d_up),
        width=gate.shape[1],
        storage=STORAGE[gate.dtype],
    )
    submit(SILU_MUL_GRAD, arguments, gate)
    return d_gate, d_up
