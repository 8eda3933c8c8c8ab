"""RMSNorm kernels on tensors: rows or heads, with the residual addition before them, and the gradients.

Mirrors kernels/norm.h. What is computed in which order stands in `zerogap.ops.norm`.
"""

import ctypes

import torch

from zerogap.ops.cpu.library import STORAGE, Arguments, Operation, empty, pointer, submit


class NormArguments(Arguments):
    _fields_ = [
        ("rows", ctypes.c_int64),
        ("x", ctypes.c_void_p),
        ("delta", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("normed", ctypes.c_void_p),
        ("heads", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("storage", ctypes.c_int32),
    ]


class NormGradArguments(Arguments):
    _fields_ = [
        ("rows", ctypes.c_int64),
        ("x", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("d_residual", ctypes.c_void_p),
        ("d_normed", ctypes.c_void_p),
        ("dx", ctypes.c_void_p),
        ("inverse", ctypes.c_void_p),
        ("pack_starts", ctypes.c_void_p),
        ("acc", ctypes.c_void_p),
        ("num_packs", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("leaves", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("storage", ctypes.c_int32),
    ]


NORM = Operation("norm", NormArguments)
NORM_GRAD = Operation("norm_grad", NormGradArguments)


def norm(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(residual, normed) of x [T, heads * D]; the residual is x itself where delta is None."""
    width = weight.shape[0]
    assert x.shape[1] == heads * width and x.dtype == weight.dtype, f"x {tuple(x.shape)} {x.dtype}, {heads} x {width}"
    assert delta is None or (delta.shape == x.shape and delta.dtype == x.dtype), "delta must be like x"
    residual = x if delta is None else empty(x, x.shape[1:], x.dtype)
    normed = empty(x, x.shape[1:], x.dtype)
    arguments = NormArguments(
        rows=x.shape[0],
        x=pointer(x),
        delta=pointer(delta),
        weight=pointer(weight),
        residual=pointer(residual),
        normed=pointer(normed),
        heads=heads,
        width=width,
        eps=eps,
        storage=STORAGE[x.dtype],
    )
    submit(NORM, arguments, x, (weight,))
    return residual, normed


def norm_grad(
    residual: torch.Tensor,
    weight: torch.Tensor,
    d_residual: torch.Tensor | None,
    d_normed: torch.Tensor,
    eps: float,
    heads: int,
    *,
    input_grad: bool,
    acc: torch.Tensor | None = None,
    pack_starts: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Input gradient [T, heads * D] (None unless `input_grad`); adds the weight's to `acc`, FP32 [leaves, D] or [D]."""
    rows, width = residual.shape[0], weight.shape[0]
    leaves = 1 if acc is None or acc.dim() == 1 else acc.shape[0]
    assert heads % leaves == 0, f"{heads} heads cannot be cut into {leaves} leaves"
    assert acc is None or (acc.dtype == torch.float32 and acc.shape[-1] == width), "acc must be FP32 [leaves, D]"
    dx = torch.empty_like(residual) if input_grad else None
    inverse = torch.empty(rows * heads)
    arguments = NormGradArguments(
        rows=rows,
        x=pointer(residual),
        weight=pointer(weight),
        d_residual=pointer(d_residual),
        d_normed=pointer(d_normed),
        dx=pointer(dx),
        inverse=pointer(inverse),
        pack_starts=pointer(pack_starts),
        acc=pointer(acc),
        num_packs=0 if pack_starts is None else pack_starts.shape[0] - 1,
        heads=heads,
        width=width,
        leaves=leaves,
        eps=eps,
        storage=STORAGE[residual.dtype],
    )
    submit(NORM_GRAD, arguments, residual)
    return dx
