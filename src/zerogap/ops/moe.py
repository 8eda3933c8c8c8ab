"""Mixture of experts: router, routed experts, shared experts and their sum, as one op.

Formula (Qwen3-MoE; DeepSeek-V3 section 2.1.2), for a token x:

    z = x W_router^T                        FP32, never rounded
    s = softmax(z) or sigmoid(z)            FP32; own exp; a softmax's maximum and sum over sixteen lanes
    c = s + bias                            chooses only; DeepSeek-V3's e_score_correction_bias, FP32
    experts = the k largest c, among the best groups; ties to the lower index; listed ascending
    w = s_e / (sum of the chosen s) * scaling, or s_e * scaling without `normalise`
    y = rn(w_1 E_1(x) + ... + w_k E_k(x) + shared(x)),  E(x) = rn(W_down rn(silu(rn(W_gate x)) * rn(W_up x)))

The sum runs in FP32 from +0 by fused multiply-adds, experts ascending by index, then the shared experts' output; expert
outputs are rounded to the storage dtype before it. Expert products are those of `ops.gemm` in one leaf; the shared MLP
has leaves by the MLP rule. Gradients: docs/numerics.md, "Mixture of experts".

Depends on: the token's own x and the weights. Never on: other tokens, how many there are, which experts they chose,
threads. Weight gradients depend on packs: an expert's are sums over blocks of 128 of *its* rows of a pack.

Tokens whose router sees a NaN or an infinity get weights of NaN, so their output is NaN: nothing is hidden.

Legend: T token rows, H hidden, E experts, k experts per token, I inner size of an expert, F of the shared MLP. *Sorted*
tensors hold a row per pair of token and expert, by expert, then token: [T, k, ...] in memory.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from zerogap.errors import ConfigError
from zerogap.ops import gemm, tap
from zerogap.ops.cpu import activation, grouped, quant
from zerogap.ops.cpu import gemm as native
from zerogap.ops.cpu import moe as kernels
from zerogap.ops.handle import WeightHandle
from zerogap.ops.stack import PanelStack
from zerogap.types import LOCAL, Exchange, ForwardContext

SCORINGS = ("softmax", "sigmoid")
MOST_EXPERTS = 2**15  # indices of int16


@dataclasses.dataclass(frozen=True)
class Routing:
    """How a router chooses.

    Attributes:
        num_experts, top_k: E and k.
        scoring: `softmax` over all experts, or `sigmoid` of each.
        normalise: weights are divided by their sum (plus 1e-20 where scores are sigmoids, as DeepSeek-V3 has it).
        scaling: the last factor of every weight.
        groups, top_groups: experts stand in `groups` groups of consecutive ones; only those of the `top_groups` with
            the largest sum of two choices are eligible. 1 and 1: no groups.
    """

    num_experts: int
    top_k: int
    scoring: str = "softmax"
    normalise: bool = True
    scaling: float = 1.0
    groups: int = 1
    top_groups: int = 1

    def __post_init__(self) -> None:
        def refuse(key: str, mend: str) -> None:
            raise ConfigError(f"routing.{key}", getattr(self, key), mend)

        if not 1 <= self.num_experts <= MOST_EXPERTS:
            refuse("num_experts", f"choose 1 to {MOST_EXPERTS}: a record of routing holds their numbers in 16 bits")
        if self.scoring not in SCORINGS:
            refuse("scoring", f"choose {' or '.join(SCORINGS)}")
        if not 0.0 < self.scaling < float("inf"):
            refuse("scaling", "choose a positive number")
        if self.groups < 1 or self.num_experts % self.groups:
            refuse("groups", f"choose a divisor of num_experts ({self.num_experts})")
        if self.groups > 1 and self.num_experts // self.groups < 2:
            refuse("groups", "a group is ordered by its two best experts: leave it at least two")
        if not 1 <= self.top_groups <= self.groups:
            refuse("top_groups", f"choose a number from 1 to groups ({self.groups})")
        eligible = self.top_groups * (self.num_experts // self.groups)
        if not 1 <= self.top_k <= eligible:
            refuse("top_k", f"choose a number from 1 to {eligible}, the experts of the groups that are kept")


@dataclasses.dataclass(frozen=True, eq=False)
class MoEWeights:
    """The weights of one routed layer.

    Attributes:
        router: [E, H], never FP8.
        bias: buffer [E], added to scores for the choice alone, or None.
        gate, up, down: stacks of E matrices [I, H], [I, H] and [H, I].
        shared: gate [F, H], up [F, H] and down [H, F] of the shared experts as one MLP, or None.
    """

    router: WeightHandle
    bias: WeightHandle | None
    gate: PanelStack
    up: PanelStack
    down: PanelStack
    shared: tuple[WeightHandle, WeightHandle, WeightHandle] | None = None

    def handles(self) -> list[WeightHandle]:
        """All weights that gradients may train."""
        return [self.router, *self.gate.handles, *self.up.handles, *self.down.handles, *(self.shared or ())]


def moe(
    x: torch.Tensor,
    weights: MoEWeights,
    routing: Routing,
    context: ForwardContext,
    layer: int,
    exchange: Exchange = LOCAL,
) -> torch.Tensor:
    """A routed layer's update of the residual stream.

    Args:
        x: [T, H] storage dtype.
        weights, routing: of this layer.
        context: `routing` is where choices are recorded, or None. Backward: `pack_starts`; `sample_starts` where
            `balance` is not 0.
        layer: index of the decoder layer, for the record.
        exchange: of a layout that splits the shared MLP's inner axis.

    Returns:
        [T, H], storage dtype.
    """
    trained = next((h for h in weights.handles() if h.trainable), None) if torch.is_grad_enabled() else None
    if torch.is_grad_enabled() and (x.requires_grad or trained is not None):
        anchor = (trained or weights.router).anchor
        out = _MoE.apply(x, anchor, weights, routing, context, layer, exchange)
    else:
        out = _forward(x, weights, routing, context, layer, exchange).out
    tap.observe("moe", {"out": out}, {"x": x, "weights": weights, "routing": routing, "layer": layer})
    return out


class _Forward(NamedTuple):
    """What the backward pass reads: see the legend. `gate`, `up` and `rows` (expert outputs) are sorted."""

    out: torch.Tensor
    logits: torch.Tensor
    experts: torch.Tensor
    expert_weights: torch.Tensor
    order: kernels.Order
    gate: torch.Tensor
    up: torch.Tensor
    rows: torch.Tensor
    shared_gate: torch.Tensor | None
    shared_up: torch.Tensor | None


def _forward(
    x: torch.Tensor,
    weights: MoEWeights,
    routing: Routing,
    context: ForwardContext,
    layer: int,
    exchange: Exchange,
) -> _Forward:
    segment = native.Segment(x, weights.router.panels, routing.num_experts)
    (logits,) = native.product([segment], "concatenate", fp32=True)
    recorded = None if context.routing is None else context.routing.rows(layer, len(x))
    bias = None if weights.bias is None else weights.bias.rows
    experts, expert_weights, margins = kernels.route(logits, bias, routing, recorded)
    found = {"logits": logits, "experts": experts, "weights": expert_weights, "margins": margins}
    tap.observe("router", found, {"x": x, "weights": weights, "routing": routing, "layer": layer})
    order = kernels.dispatch(experts, routing.num_experts, x)

    inputs = _spread(x, order.slots, (weights.gate, weights.up))
    gate, up = _grouped(inputs, (weights.gate, weights.up), "concatenate", order)
    inner = _silu_mul(gate, up)
    (rows,) = _grouped([_quantised(inner, weights.down)], (weights.down,), "concatenate", order)
    tap.observe("experts", {"rows": rows}, {"order": order, "weights": weights, "layer": layer})

    shared = shared_gate = shared_up = None
    if weights.shared is not None:
        gate_weight, up_weight, down_weight = weights.shared
        shared_gate, shared_up = gemm.project(x, (gate_weight, up_weight), (None, None), exchange=LOCAL)
        shared_inner = activation.silu_mul(shared_gate, shared_up)
        (shared,) = gemm.project(shared_inner, (down_weight,), (None,), exchange=exchange)
    out = kernels.combine(rows, order.slots, expert_weights, shared)
    return _Forward(out, logits, experts, expert_weights, order, gate, up, rows, shared_gate, shared_up)


# ------------------------------------------------------------------------------------------------ expert products


class _Rows(NamedTuple):
    """Sorted rows of a grouped product: grid values with their scales, or numbers as they are."""

    x: torch.Tensor
    scales: torch.Tensor | None = None


def _spread(x: torch.Tensor, slots: torch.Tensor, stacks: Sequence[PanelStack]) -> list[_Rows]:
    """Sorted rows of x [T, H] for each stack; x is quantised before it is copied, and copied once in each form."""
    forms: dict[str | None, _Rows] = {}
    for scale_format in dict.fromkeys(map(_format, stacks)):
        if scale_format is None:
            forms[None] = _Rows(kernels.spread(x, slots))
        else:
            grid, scales = quant.quantise_rows(x, scale_format)
            forms[scale_format] = _Rows(kernels.spread(grid, slots), kernels.spread(scales, slots))
    return [forms[_format(stack)] for stack in stacks]


def _format(stack: PanelStack) -> str | None:
    return None if stack.fp8 is None else stack.fp8.scale_format


def _quantised(x: torch.Tensor, stack: PanelStack) -> _Rows:
    """Sorted rows for the forward product of one stack."""
    return _Rows(x) if stack.fp8 is None else _Rows(*quant.quantise_rows(x, stack.fp8.scale_format))


def _grouped(
    inputs: Sequence[_Rows], stacks: Sequence[PanelStack], mode: str, order: kernels.Order
) -> tuple[torch.Tensor, ...]:
    """Forward products of sorted rows with their experts' matrices."""
    segments = [
        grouped.GroupSegment(rows.x, stack.panels, *stack.shape, x_scales=rows.scales, panel_scales=stack.scales)
        for rows, stack in zip(inputs, stacks, strict=True)
    ]
    return grouped.grouped_product(segments, mode, starts=order.starts, lines=order.slots.shape[1])


def _grouped_input_grad(
    dys: Sequence[torch.Tensor], stacks: Sequence[PanelStack], order: kernels.Order, fp32: bool
) -> torch.Tensor:
    """One chain over the stacks: sorted rows' input gradients."""
    segments = []
    for dy, stack in zip(dys, stacks, strict=True):
        reduce, width = stack.shape
        segment = grouped.GroupSegment(dy, stack.transposed, width, reduce)
        scale_format = gemm.gradient_format(stack.fp8)
        if scale_format is not None:
            grid, scales = quant.quantise_rows(dy, scale_format)
            segment = segment._replace(x=grid, x_scales=scales, panel_scales=stack.scales, transposed=True)
        segments.append(segment)
    lines = order.slots.shape[1]
    return grouped.grouped_product(segments, "chain", starts=order.starts, lines=lines, fp32=fp32)[0]


def _grouped_weight_grad(dy: torch.Tensor, x: torch.Tensor, stack: PanelStack, packs: torch.Tensor | None) -> None:
    trained = [handle.trainable for handle in stack.handles]
    sums = [handle.grad if handle.trainable else None for handle in stack.handles]
    assert packs is not None and [s is not None for s in sums] == trained, f"{stack.name}: no open bin, or no packs"
    grouped.grouped_weight_grad(dy, x, packs, sums, gemm.gradient_format(stack.fp8))


def _silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """SiLU(gate) * up of sorted rows [T, k, I]; a row of the command is a token's k lines."""
    rows, k, width = gate.shape
    return activation.silu_mul(gate.view(rows, k * width), up.view(rows, k * width)).view(rows, k, width)


def _silu_mul_grad(gate: torch.Tensor, up: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, k, width = gate.shape
    d_gate, d_up = activation.silu_mul_grad(*(t.view(rows, k * width) for t in (gate, up, dy)))
    return d_gate.view(rows, k, width), d_up.view(rows, k, width)


# ------------------------------------------------------------------------------------------------ gradients


def _trained(*stacks: PanelStack) -> bool:
    return any(handle.trainable for stack in stacks for handle in stack.handles)


class _MoE(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        anchor: torch.Tensor,
        weights: MoEWeights,
        routing: Routing,
        context: ForwardContext,
        layer: int,
        exchange: Exchange,
    ) -> torch.Tensor:
        done = _forward(x, weights, routing, context, layer, exchange)
        # A record's buffers serve many passes; the backward needs this one's.
        experts = done.experts if context.routing is None else done.experts.clone()
        shared = (done.shared_gate, done.shared_up) if weights.shared is not None else ()
        kept = (x, done.logits, experts, done.expert_weights, done.gate, done.up, done.rows)
        ctx.save_for_backward(*kept, *done.order, *shared)
        ctx.weights, ctx.routing, ctx.context, ctx.exchange = weights, routing, context, exchange
        return done.out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, logits, experts, expert_weights, gate, up, rows, *rest = ctx.saved_tensors
        order, shared = kernels.Order(*rest[:3]), rest[3:]
        weights, wants_dx, dy = ctx.weights, ctx.needs_input_grad[0], dy.contiguous()
        routed = wants_dx or weights.router.trainable
        inside = wants_dx or _trained(weights.gate, weights.up, weights.down)
        d_rows, d_weights = kernels.combine_grad(dy, rows, order.slots, expert_weights, inside, routed)
        dx = None if d_rows is None else _experts_grad(ctx, x, gate, up, d_rows, order)
        dx_shared = _shared_grad(ctx, x, dy, *shared) if shared else None
        dx_router = None
        if d_weights is not None:
            balance, starts = ctx.context.balance, ctx.context.sample_starts
            d_logits = kernels.route_grad(logits, experts, d_weights, ctx.routing, x.dtype, balance, starts)
            gemm.weight_grads([d_logits], x, (weights.router,), ctx.context.pack_starts)
            if wants_dx:
                dx_router = gemm.input_grad([d_logits], (weights.router,), "chain", LOCAL, fp32=True)
        if dx is not None and wants_dx:
            dx = kernels.gather_sum(dx, order.slots, dx_shared, dx_router, x.dtype)
        return dx, *[None] * 6


def _experts_grad(
    ctx: Any, x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, d_rows: torch.Tensor, order: kernels.Order
) -> torch.Tensor | None:
    """Gradients of the experts' weights, and FP32 sorted input gradients [T, k, H] where x wants them."""
    weights, pack_starts, wants_dx = ctx.weights, ctx.context.pack_starts, ctx.needs_input_grad[0]
    first_trained, down_trained = _trained(weights.gate, weights.up), _trained(weights.down)
    packs = None
    if pack_starts is not None and (first_trained or down_trained):
        packs = grouped.routed_packs(order.starts, order.tokens, pack_starts)
    if down_trained:
        _grouped_weight_grad(d_rows, _silu_mul(gate, up), weights.down, packs)
    if not (first_trained or wants_dx):
        return None
    d_inner = _grouped_input_grad([d_rows], (weights.down,), order, fp32=False)
    d_gate, d_up = _silu_mul_grad(gate, up, d_inner)
    if first_trained:
        x_rows = kernels.spread(x, order.slots)
        _grouped_weight_grad(d_gate, x_rows, weights.gate, packs)
        _grouped_weight_grad(d_up, x_rows, weights.up, packs)
    return _grouped_input_grad([d_gate, d_up], (weights.gate, weights.up), order, fp32=True) if wants_dx else None


def _shared_grad(
    ctx: Any, x: torch.Tensor, dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> torch.Tensor | None:
    """Gradients of the shared MLP's weights, and its FP32 input gradient [T, H] where x wants it."""
    gate_weight, up_weight, down_weight = ctx.weights.shared
    pack_starts, wants_dx = ctx.context.pack_starts, ctx.needs_input_grad[0]
    if down_weight.trainable:
        gemm.weight_grads([dy], activation.silu_mul(gate, up), (down_weight,), pack_starts)
    if not (wants_dx or gate_weight.trainable or up_weight.trainable):
        return None
    d_inner = gemm.input_grad([dy], (down_weight,), "chain", LOCAL)
    d_gate, d_up = activation.silu_mul_grad(gate, up, d_inner)
    first = (gate_weight, up_weight)
    gemm.weight_grads([d_gate, d_up], x, first, pack_starts)
    return gemm.input_grad([d_gate, d_up], first, "chain", ctx.exchange, fp32=True) if wants_dx else None
