"""Matrix products: fused projections, the head's logits, and their gradients.

Formula: `y_i = x W_i^T + b_i` for weights that share their input. BF16 or FP32 in, FP32 accumulators, `rn` once.
Order: one accumulator per output element and leaf, ascending k with the backend class's multiply-add primitive (BF16:
pairs, odd element first); leaves joined by the fixed tree (adjacent pairs, an odd last one passes up); bias added FP32.
Depends on: the row itself, the weight, the leaf size. Never on: number, position or values of other rows, which
projections are concatenated, threads, or ranks that own whole leaves.

FP8 (a weight with `spec.fp8`): x is quantised to E4M3 per row and 128 elements of K, W per 128 x 128 elements. Inside a
block of 128 elements the sum runs from +0, then acc = fma(block, fl32(s_x * s_w), acc), blocks ascending. With
`spec.fp8.gradients` so are the products of the gradients: dy per row and 128 outputs for dx, dy and x per column and
block of 128 rows for dW; otherwise those are BF16 products of the published weight. Backward keeps the BF16 x.

Gradients: dx is the same product over the output axis, over all weights of the call. `chain` (gate, up): one
accumulator per leaf runs gate's slice, then up's. `trees` (q, k, v): separate trees, finished, added FP32 in that
order, `rn` once. dW is a sum over blocks of 128 rows of a pack, each from +0, added ascending to the handle's FP32
accumulator; it never passes through torch.

Shapes: T rows, K inputs, N_i outputs, R rows of the head, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch

from zerogap.ops import tap
from zerogap.ops.cpu import gemm as cpu
from zerogap.ops.cpu import quant
from zerogap.ops.handle import WeightHandle
from zerogap.types import LOCAL, Exchange, ForwardContext, FP8Blocks

GRADIENTS = ("chain", "trees")


def linear(
    x: torch.Tensor,
    weights: Sequence[WeightHandle],
    biases: Sequence[WeightHandle | None],
    context: ForwardContext,
    *,
    gradient: str,
    exchange: Exchange = LOCAL,
    grad_exchange: Exchange = LOCAL,
) -> tuple[torch.Tensor, ...]:
    """Projections of one input, in one native command.

    Args:
        x: [T, K] storage dtype.
        weights: handles [N_i, K]; leaves hold `K / spec.in_leaves` elements forward, `N_i / spec.out_leaves` backward.
        biases: one per weight, [N_i] or None.
        context: `pack_starts` is needed where a weight is trainable.
        gradient: how dx sums over the weights: `chain` (gate, up; also a single weight) or `trees` (q, k, v).
        exchange: of a layout that splits the input axis (o_proj, down_proj): x and the handles hold this rank's run of
            whole leaves, and the outputs are sums over all ranks.
        grad_exchange: of a layout that splits the output axis (q, k, v, gate, up): outputs and handles are this rank's,
            and dx is the sum over all ranks.

    Returns:
        one [T, N_i] in the storage dtype per weight.
    """
    assert gradient in GRADIENTS and len(weights) == len(biases), f"linear: {gradient}, {len(biases)} biases"
    handles = [*weights, *[b for b in biases if b is not None]]
    if torch.is_grad_enabled() and (x.requires_grad or any(h.trainable for h in handles)):
        how = (gradient, exchange, grad_exchange)
        outs = _Linear.apply(x, weights, biases, context, how, *[h.anchor for h in handles])
    else:
        outs = project(x, weights, biases, exchange)
    tap.observe("linear", {w.spec.name: y for w, y in zip(weights, outs, strict=True)}, {"x": x, "weights": weights})
    return outs


def project(
    x: torch.Tensor, weights: Sequence[WeightHandle], biases: Sequence[WeightHandle | None], exchange: Exchange
) -> tuple[torch.Tensor, ...]:
    """The forward of `linear`, for ops that hold projections of their own."""
    rows = [None if b is None else b.rows for b in biases]
    split = exchange.size > 1
    formats = {w.spec.fp8.scale_format for w in weights if w.spec.fp8}
    assert len(formats) <= 1, f"linear: one scale format, not {sorted(formats)}"
    grid, scales = quant.quantise_rows(x, *formats) if formats else (None, None)
    segments = []
    for weight, bias in zip(weights, rows, strict=True):
        (width, reduce), leaves = weight.spec.shape, weight.spec.in_leaves
        segment = cpu.Segment(x, weight.panels, width, reduce // leaves if leaves > 1 else 0, None if split else bias)
        if weight.spec.fp8 and grid is not None:
            segment = segment._replace(x=grid, x_scales=scales, panel_scales=weight.scales)
        segments.append(segment)
    outs = cpu.product(segments, "concatenate", fp32=split)
    if split:
        outs = tuple(cpu.finish([exchange.combine(y)], bias, x.dtype) for y, bias in zip(outs, rows, strict=True))
    return outs


def input_grad(
    dys: Sequence[torch.Tensor],
    weights: Sequence[WeightHandle],
    gradient: str,
    exchange: Exchange,
    fp32: bool = False,
) -> torch.Tensor:
    """The input gradient of `linear`, for ops that hold projections of their own; `fp32`: the sum before its rounding
    (`chain` only)."""
    assert not fp32 or gradient == "chain", "input_grad: only a chain is one sum"
    segments = []
    for dy, weight in zip(dys, weights, strict=True):
        (reduce, width), leaves, fp8 = weight.spec.shape, weight.spec.out_leaves, weight.spec.fp8
        segment = cpu.Segment(dy, weight.transposed, width, reduce // leaves if leaves > 1 else 0)
        if fp8 and fp8.gradients:
            grid, scales = quant.quantise_rows(dy, fp8.scale_format)
            segment = segment._replace(x=grid, x_scales=scales, panel_scales=weight.scales, transposed=True)
        segments.append(segment)
    if exchange.size == 1:
        return cpu.product(segments, gradient, fp32=fp32)[0]
    if fp32:
        return exchange.combine(cpu.product(segments, "chain", fp32=True)[0])
    if gradient == "chain":
        sums = [cpu.product(segments, "chain", fp32=True)[0]]
    else:
        sums = [cpu.product([s], "chain", fp32=True)[0] for s in segments]
    return cpu.finish([exchange.combine(s) for s in sums], None, dys[0].dtype)


def weight_grads(
    dys: Sequence[torch.Tensor], x: torch.Tensor, weights: Sequence[WeightHandle], pack_starts: torch.Tensor | None
) -> None:
    """The weight gradients of `linear`, added to the handles' accumulators."""
    for dy, weight in zip(dys, weights, strict=True):
        if weight.trainable:
            assert pack_starts is not None and weight.grad is not None, f"{weight.spec.name}: no open bin, or no packs"
            scale_format = gradient_format(weight.spec.fp8)
            cpu.weight_grad(dy, x, pack_starts, weight.grad, scale_format)


def gradient_format(fp8: FP8Blocks | None) -> str | None:
    """Scale format of FP8 gradient products, None where they keep the storage dtype."""
    return fp8.scale_format if fp8 and fp8.gradients else None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weights: Any, biases: Any, context: ForwardContext, how: Any, *_: Any
    ) -> Any:
        ctx.save_for_backward(x)
        ctx.weights, ctx.biases, ctx.pack_starts = weights, biases, context.pack_starts
        ctx.gradient, exchange, ctx.exchange = how
        return project(x, weights, biases, exchange)

    @staticmethod
    def backward(ctx: Any, *dys: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        dys = tuple(dy.contiguous() for dy in dys)
        weight_grads(dys, x, ctx.weights, ctx.pack_starts)
        for dy, bias in zip(dys, ctx.biases, strict=True):
            if bias is not None and bias.trainable:
                cpu.column_grad(dy, ctx.pack_starts, bias.grad)
        dx = input_grad(dys, ctx.weights, ctx.gradient, ctx.exchange) if ctx.needs_input_grad[0] else None
        anchors = len(ctx.weights) + sum(b is not None for b in ctx.biases)
        return dx, None, None, None, None, *[None] * anchors


def head_logits(x: torch.Tensor, weight: WeightHandle) -> torch.Tensor:
    """Logits x [R, K] W^T of the head, FP32 [R, V], never rounded; no graph is recorded."""
    (logits,) = cpu.product([cpu.Segment(x, weight.panels, weight.spec.shape[0])], "concatenate", fp32=True)
    tap.observe("head_logits", {weight.spec.name: logits}, {"x": x, "weights": (weight,)})
    return logits


def head_input_grad(dlogits: torch.Tensor, weight: WeightHandle, exchange: Exchange = LOCAL) -> torch.Tensor:
    """Gradient [R, K] of the head's input from `dlogits` [R, V], both storage dtype; leaves over the vocabulary.

    `exchange`: of a layout that splits the vocabulary; `dlogits` and the handle then hold this rank's leaves.
    """
    segment = cpu.Segment(dlogits, weight.transposed, weight.spec.shape[1], weight.spec.out_leaf_size)
    if exchange.size == 1:
        return cpu.product([segment], "chain")[0]
    return cpu.finish([exchange.combine(cpu.product([segment], "chain", fp32=True)[0])], None, dlogits.dtype)
