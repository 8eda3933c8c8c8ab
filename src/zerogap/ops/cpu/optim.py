"""Optimizer kernels on flat FP32 arrays. Mirrors kernels/optim.h; see `zerogap.ops.optim`."""

import ctypes

import torch

from zerogap.ops.cpu.library import Arguments, Operation, pointer, submit

NORM_CHUNK = 65536  # elements per chunk of `square_sums`, as in kernels/optim.h


class AdamWArguments(Arguments):
    _fields_ = [
        ("rows", ctypes.c_int64),
        ("master", ctypes.c_void_p),
        ("first", ctypes.c_void_p),
        ("second", ctypes.c_void_p),
        ("gradient", ctypes.c_void_p),
        ("gradient_scale", ctypes.c_float),
        ("beta1", ctypes.c_float),
        ("rest1", ctypes.c_float),
        ("beta2", ctypes.c_float),
        ("rest2", ctypes.c_float),
        ("decay", ctypes.c_float),
        ("step_size", ctypes.c_float),
        ("root_correction", ctypes.c_float),
        ("eps", ctypes.c_float),
    ]


class SquareSumsArguments(Arguments):
    _fields_ = [("rows", ctypes.c_int64), ("x", ctypes.c_void_p), ("sums", ctypes.c_void_p)]


class AddArguments(Arguments):
    _fields_ = [("rows", ctypes.c_int64), ("a", ctypes.c_void_p), ("b", ctypes.c_void_p), ("out", ctypes.c_void_p)]


ADAMW = Operation("adamw", AdamWArguments)
SQUARE_SUMS = Operation("square_sums", SquareSumsArguments)
ADD = Operation("add", AddArguments)


def _require_fp32(**tensors: torch.Tensor) -> None:
    shapes = {tuple(t.shape) for t in tensors.values()}
    assert len(shapes) == 1, f"{', '.join(tensors)} must have one shape, not {shapes}"
    for name, tensor in tensors.items():
        assert tensor.dtype == torch.float32, f"{name} must be FP32, not {tensor.dtype}"


def adamw(
    master: torch.Tensor, first: torch.Tensor, second: torch.Tensor, gradient: torch.Tensor, **constants: float
) -> None:
    """One step in place on master and moments; `constants` are the scalar fields of `AdamWArguments`."""
    _require_fp32(master=master, first=first, second=second, gradient=gradient)
    arguments = AdamWArguments(
        rows=master.numel(),
        master=pointer(master),
        first=pointer(first),
        second=pointer(second),
        gradient=pointer(gradient),
        **constants,
    )
    submit(ADAMW, arguments, master)


def square_sums(x: torch.Tensor) -> torch.Tensor:
    """FP64 [chunks]: the sum of squares of each chunk of 65,536 elements of x (FP32, flattened)."""
    _require_fp32(x=x)
    sums = torch.empty(-(-x.numel() // NORM_CHUNK), dtype=torch.float64)
    submit(SQUARE_SUMS, SquareSumsArguments(rows=x.numel(), x=pointer(x), sums=pointer(sums)), x)
    return sums


def add(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """out = a + b, FP32; out may be a or b."""
    _require_fp32(a=a, b=b, out=out)
    submit(ADD, AddArguments(rows=a.numel(), a=pointer(a), b=pointer(b), out=pointer(out)), a)
