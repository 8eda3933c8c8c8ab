"""Rows by index: the embedding look-up, and the rows of the hidden state that go to the head.

Both copy rows, bit for bit. Gradient of the embedding, FP32: for each block of 128 rows of a pack, ascending, the rows
with one id are summed from +0, ascending, and the sum is added to that id's row of the open bin's accumulator. Gradient
of `gather_rows`: the rows go back to their places, +0 elsewhere. Nothing depends on the number of rows or threads;
weight gradients depend on rows and pack borders only.
"""

import torch
from torch.autograd.function import once_differentiable

from zerogap.errors import ConfigError
from zerogap.ops import tap
from zerogap.ops.cpu import embedding as kernels
from zerogap.ops.cpu import library
from zerogap.ops.handle import WeightHandle
from zerogap.types import ForwardContext


def embedding(ids: torch.Tensor, weight: WeightHandle, context: ForwardContext) -> torch.Tensor:
    """Look up token ids.

    Args:
        ids: int64 [T].
        weight: embedding [V, H]; its gradient goes to `weight.grad`.
        context: `pack_starts` cuts the blocks of the weight gradient.

    Returns:
        [T, H], storage dtype.

    Raises:
        ConfigError: an id outside the vocabulary (not checked while recording: the ids are then still to come).
    """
    assert weight.rows is not None, f"{weight.spec.name} is not an embedding"
    _check_range("token id", ids, weight.rows.shape[0], "the vocabulary")
    if torch.is_grad_enabled() and weight.trainable:
        out = _Embedding.apply(weight.anchor, ids, weight, context)
    else:
        out = kernels.gather(weight.rows, ids, keep=(weight.rows,))
    tap.observe("embedding", {"out": out}, {"ids": ids, "weight": weight.spec.name})
    return out


def gather_rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The named rows of x, in their order.

    Args:
        x: [T, H].
        rows: int64 [R], differing from each other where a gradient is taken.

    Returns:
        [R, H]; its rows are those of `rows` for whatever is recorded after it.
    """
    _check_range("output row", rows, x.shape[0], "the rows of x")
    if torch.is_grad_enabled() and x.requires_grad:
        out = _GatherRows.apply(x, rows)
    else:
        out = kernels.gather(x, rows)
    tap.observe("gather_rows", {"out": out}, {"x": x, "rows": rows})
    return out


def _check_range(name: str, index: torch.Tensor, size: int, what: str) -> None:
    if library.recording() or not index.numel():
        return
    low, high = int(index.min()), int(index.max())
    if low < 0 or high >= size:
        raise ConfigError(name, low if low < 0 else high, f"choose from 0 to {size - 1}, the size of {what}")


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, anchor, ids, weight, context):
        ctx.ids, ctx.weight, ctx.context = ids, weight, context
        return kernels.gather(weight.rows, ids)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        weight: WeightHandle = ctx.weight
        assert weight.grad is not None and ctx.context.pack_starts is not None, (
            f"{weight.spec.name}: a backward pass needs an open gradient bin and pack borders"
        )
        kernels.embedding_grad(dy.contiguous(), ctx.ids, ctx.context.pack_starts, weight.grad)
        return None, None, None, None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rows):
        ctx.rows, ctx.num_rows = rows, x.shape[0]
        return kernels.gather(x, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return kernels.scatter(dy.contiguous(), ctx.rows, ctx.num_rows), None
