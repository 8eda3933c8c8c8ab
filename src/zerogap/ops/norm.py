"""RMSNorm with the residual addition before it, and query/key norm per head.

Formula (Zhang and Sennrich 2019, eq. 4; the epsilon inside the root as in Llama and Qwen):

    r = rn(x + delta)                                 FP32 addition, rounded to the storage dtype
    inv = 1 / sqrt(lanesum(r * r) / D + eps)           FP32, division and root correctly rounded
    normed = rn((r * inv) * weight)                    FP32, one rounding

`lanesum` runs sixteen chains of fused multiply-adds, element i in lane i % 16, ascending, then the halving tree. Input
gradient, FP32, with n = r * inv, g = d_normed * weight and c = lanesum(g * n) / D:

    dx = ddelta = rn(d_residual + (g - n * c) * inv)    an absent d_residual is not added; an absent d_normed leaves
                                                       d_residual as it is

Weight gradient: for each block of 128 rows of a pack, the chain of fma(d_normed, n, sum) from +0, rows ascending, is
added to the open bin's accumulator, blocks ascending; query/key norms keep one accumulator per leaf of heads, heads of
the leaf ascending inside a row. A row's values depend on that row and the weight only: never on the number of rows,
neighbours, threads or whether a graph is recorded; weight gradients depend on rows and pack borders only.
"""

import torch
from torch.autograd.function import once_differentiable

from zerogap.ops import tap
from zerogap.ops.cpu import norm as kernels
from zerogap.ops.handle import WeightHandle
from zerogap.types import ForwardContext


def rms_norm(
    x: torch.Tensor, delta: torch.Tensor | None, weight: WeightHandle, eps: float, context: ForwardContext
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add an update to the residual stream and norm the sum.

    Args:
        x: [T, D] storage dtype, the residual stream.
        delta: [T, D] update to add, or None: the residual stream is then x itself, uncopied.
        weight: vector [D]; its gradient goes to `weight.grad`, [D].
        eps: under the root, rounded to FP32.
        context: `pack_starts` cuts the blocks of the weight gradient.

    Returns:
        (residual, normed), [T, D] each, storage dtype.
    """
    inputs = (x,) if delta is None else (x, delta)
    if torch.is_grad_enabled() and (weight.trainable or any(t.requires_grad for t in inputs)):
        residual, normed = _Norm.apply(x, delta, weight.anchor, weight, eps, 1, context)
    else:
        residual, normed = kernels.norm(x, delta, _rows(weight), eps, 1)
    info = {"x": x, "delta": delta, "weight": weight.spec.name, "eps": eps}
    tap.observe("rms_norm", {"residual": residual, "normed": normed}, info)
    return residual, normed


def head_norm(
    x: torch.Tensor, weight: WeightHandle, num_heads: int, eps: float, leaves: int, context: ForwardContext
) -> torch.Tensor:
    """Norm each head of queries or keys over its D elements.

    Args:
        x: [T, num_heads * D] storage dtype.
        weight: vector [D]; its gradient goes to `weight.grad`, [leaves, D], one row per leaf of heads.
        leaves: leaves of the head axis; divides `num_heads`.
        eps, context: as in `rms_norm`.

    Returns:
        [T, num_heads * D], storage dtype.
    """
    if torch.is_grad_enabled() and (weight.trainable or x.requires_grad):
        assert not weight.trainable or weight.grad is None or weight.grad.shape[0] == leaves, (
            f"{weight.spec.name}: gradient of {tuple(weight.grad.shape)} for {leaves} leaves"
        )
        normed = _HeadNorm.apply(x, weight.anchor, weight, eps, num_heads, context)
    else:
        _, normed = kernels.norm(x, None, _rows(weight), eps, num_heads)
    tap.observe(
        "head_norm", {"normed": normed}, {"x": x, "weight": weight.spec.name, "num_heads": num_heads, "eps": eps}
    )
    return normed


def _rows(weight: WeightHandle) -> torch.Tensor:
    assert weight.rows is not None, f"{weight.spec.name} is not a vector"
    return weight.rows


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, delta, anchor, weight, eps, heads, context):
        residual, normed = kernels.norm(x, delta, _rows(weight), eps, heads)
        ctx.save_for_backward(residual)
        ctx.weight, ctx.eps, ctx.heads, ctx.context = weight, eps, heads, context
        ctx.set_materialize_grads(False)
        return residual, normed

    @staticmethod
    @once_differentiable
    def backward(ctx, d_residual, d_normed):
        (residual,) = ctx.saved_tensors
        wanted = any(ctx.needs_input_grad[:2])
        if d_normed is None:
            dx = d_residual
        else:
            dx = _grad(ctx, residual, d_residual, d_normed, ctx.heads, wanted)
        return (
            dx if ctx.needs_input_grad[0] else None,
            dx if ctx.needs_input_grad[1] else None,
            *[None] * 5,
        )


class _HeadNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, anchor, weight, eps, heads, context):
        _, normed = kernels.norm(x, None, _rows(weight), eps, heads)
        ctx.save_for_backward(x)
        ctx.weight, ctx.eps, ctx.heads, ctx.context = weight, eps, heads, context
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx, d_normed):
        (x,) = ctx.saved_tensors
        return _grad(ctx, x, None, d_normed, ctx.heads, ctx.needs_input_grad[0]), *[None] * 5


def _grad(ctx, residual, d_residual, d_normed, heads: int, input_grad: bool) -> torch.Tensor | None:
    weight: WeightHandle = ctx.weight
    acc = weight.grad if weight.trainable else None
    assert not weight.trainable or (acc is not None and ctx.context.pack_starts is not None), (
        f"{weight.spec.name}: a backward pass needs an open gradient bin and pack borders"
    )
    return kernels.norm_grad(
        residual,
        _rows(weight),
        None if d_residual is None else d_residual.contiguous(),
        d_normed.contiguous(),
        ctx.eps,
        heads,
        input_grad=input_grad,
        acc=acc,
        pack_starts=ctx.context.pack_starts,
    )
