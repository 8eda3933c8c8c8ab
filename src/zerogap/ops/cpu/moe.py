"""Router, order of rows, combination and their gradients, on tensors. Mirrors kernels/moe.h; see `zerogap.ops.moe`.

Every forward function is one recordable command over T rows; *sorted* tensors hold k lines per row, [T, k, ...].
"""

import ctypes
from typing import TYPE_CHECKING, NamedTuple

import torch

from zerogap.ops.cpu.library import STORAGE, Arguments, Operation, empty, pointer, submit

if TYPE_CHECKING:
    from zerogap.ops.moe import Routing

_address, _int32, _int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


class _RouterRule(ctypes.Structure):
    _fields_ = (
        *[(name, _int64) for name in ("num_experts", "top_k")],
        *[(name, _int32) for name in ("sigmoid", "normalise")],
        ("scaling", ctypes.c_float),
    )


class _RouteArguments(Arguments):
    _fields_ = (
        ("rows", _int64),
        *[(name, _address) for name in ("logits", "bias", "experts", "weights", "margins")],
        ("rule", _RouterRule),
        *[(name, _int64) for name in ("groups", "top_groups")],
    )


class _DispatchArguments(Arguments):
    _fields_ = (
        ("rows", _int64),
        *[(name, _address) for name in ("experts", "starts", "tokens", "slots")],
        *[(name, _int64) for name in ("num_experts", "top_k")],
    )


class _SpreadArguments(Arguments):
    _fields_ = (
        ("rows", _int64),
        *[(name, _address) for name in ("source", "slots", "out")],
        *[(name, _int64) for name in ("row_bytes", "top_k")],
    )


class _CombineArguments(Arguments):
    _fields_ = (
        ("rows", _int64),
        *[(name, _address) for name in ("sorted", "slots", "weights", "shared", "out")],
        *[(name, _int64) for name in ("width", "top_k")],
        ("storage", _int32),
    )


class _CombineGradArguments(Arguments):
    _fields_ = (
        ("rows", _int64),
        *[(name, _address) for name in ("dy", "sorted", "slots", "weights", "d_sorted", "d_weights")],
        *[(name, _int64) for name in ("width", "top_k")],
        ("storage", _int32),
    )


class _RouteGradArguments(Arguments):
    _fields_ = (
        ("rows", _int64),
        *[(name, _address) for name in ("logits", "experts", "d_weights", "sample_starts", "counts", "out")],
        ("rule", _RouterRule),
        ("num_sequences", _int64),
        ("balance", ctypes.c_double),
        ("storage", _int32),
    )


class _GatherSumArguments(Arguments):
    _fields_ = (
        ("rows", _int64),
        *[(name, _address) for name in ("sorted", "slots", "shared", "router", "out")],
        *[(name, _int64) for name in ("width", "top_k")],
        ("storage", _int32),
    )


_route = Operation("route", _RouteArguments)
_dispatch = Operation("dispatch", _DispatchArguments)
_spread = Operation("spread", _SpreadArguments)
_combine = Operation("combine", _CombineArguments)
_combine_grad = Operation("combine_grad", _CombineGradArguments)
_route_grad = Operation("route_grad", _RouteGradArguments)
_gather_sum = Operation("gather_sum", _GatherSumArguments)


def _rule(routing: "Routing") -> _RouterRule:
    sigmoid = routing.scoring == "sigmoid"
    return _RouterRule(routing.num_experts, routing.top_k, sigmoid, routing.normalise, routing.scaling)


# ------------------------------------------------------------------------------------------------ forward


def route(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    routing: "Routing",
    recorded: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The experts of each token.

    Args:
        logits: FP32 [T, E].
        bias: FP32 [E], added to the scores for the choice alone, or None.
        recorded: buffers to write experts and margins to, instead of new ones.

    Returns:
        experts int32 [T, k] ascending, weights FP32 [T, k], margins FP32 [T].
    """
    k = routing.top_k
    assert logits.dtype == torch.float32 and logits.shape[1] == routing.num_experts, f"route: {tuple(logits.shape)}"
    assert bias is None or (bias.dtype == torch.float32 and bias.shape == logits.shape[1:]), "route: bias"
    experts, margins = recorded or (empty(logits, (k,), torch.int32), empty(logits, (), torch.float32))
    assert experts.dtype == torch.int32 and tuple(experts.shape) == (len(logits), k), "route: experts are int32 [T, k]"
    assert margins.dtype == torch.float32 and margins.shape == logits.shape[:1], "route: margins are float32 [T]"
    weights = empty(logits, (k,), torch.float32)
    arguments = _RouteArguments(
        len(logits), *(pointer(t) for t in (logits, bias, experts, weights, margins)), _rule(routing),
        routing.groups, routing.top_groups,
    )  # fmt: skip
    submit(_route, arguments, logits, (bias, experts, margins))
    return experts, weights, margins


class Order(NamedTuple):
    """How the T k pairs of token and expert stand as sorted rows: by expert, then token.

    Attributes:
        starts: int32 [E + 1] first sorted row of each expert, then T k.
        tokens: int32 [T, k] token of each sorted row, in sorted order.
        slots: int32 [T, k] sorted row of each token's experts.
    """

    starts: torch.Tensor
    tokens: torch.Tensor
    slots: torch.Tensor


def dispatch(experts: torch.Tensor, num_experts: int, rows_of: torch.Tensor) -> Order:
    """The order of rows for `experts` int32 [T, k]; `rows_of`: a tensor with the T rows of the program."""
    k = experts.shape[1]
    starts = torch.zeros(num_experts + 1, dtype=torch.int32)
    tokens, slots = empty(rows_of, (k,), torch.int32), empty(rows_of, (k,), torch.int32)
    addresses = (pointer(t) for t in (experts, starts, tokens, slots))
    submit(_dispatch, _DispatchArguments(len(experts), *addresses, num_experts, k), rows_of, (experts, starts))
    return Order(starts, tokens, slots)


def spread(source: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Sorted rows [T, k, N] of source [T, N], any dtype."""
    (rows, width), k = source.shape, slots.shape[1]
    out = empty(source, (k, width), source.dtype)
    addresses = (pointer(t) for t in (source, slots, out))
    submit(_spread, _SpreadArguments(rows, *addresses, width * source.element_size(), k), source, (slots,))
    return out


def combine(
    sorted_rows: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None
) -> torch.Tensor:
    """Weighted sums [T, N] of sorted rows [T, k, N], experts ascending, then shared [T, N]; rounded once."""
    rows, k, width = sorted_rows.shape
    assert shared is None or (shared.shape == (rows, width) and shared.dtype == sorted_rows.dtype), "combine: shared"
    out = empty(sorted_rows, (width,), sorted_rows.dtype)
    addresses = (pointer(t) for t in (sorted_rows, slots, weights, shared, out))
    submit(_combine, _CombineArguments(rows, *addresses, width, k, STORAGE[out.dtype]), sorted_rows)
    return out


# ------------------------------------------------------------------------------------------------ backward


def combine_grad(
    dy: torch.Tensor,
    sorted_rows: torch.Tensor,
    slots: torch.Tensor,
    weights: torch.Tensor,
    inputs: bool,
    router: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients, from dy [T, N], of sorted rows [T, k, N] where `inputs`, and of weights FP32 [T, k] where `router`."""
    rows, k, width = sorted_rows.shape
    assert dy.shape == (rows, width) and dy.dtype == sorted_rows.dtype, f"combine_grad: {dy.dtype} {tuple(dy.shape)}"
    d_sorted = torch.empty_like(sorted_rows) if inputs else None
    d_weights = torch.empty_like(weights) if router else None
    addresses = (pointer(t) for t in (dy, sorted_rows, slots, weights, d_sorted, d_weights))
    submit(_combine_grad, _CombineGradArguments(rows, *addresses, width, k, STORAGE[dy.dtype]), dy)
    return d_sorted, d_weights


def route_grad(
    logits: torch.Tensor,
    experts: torch.Tensor,
    d_weights: torch.Tensor,
    routing: "Routing",
    storage: torch.dtype,
    balance: float = 0.0,
    sample_starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gradient [T, E] of the logits, in the dtype `storage`; with `balance`, that of the balance loss of the sequences
    that begin at `sample_starts` (int32 [S + 1])."""
    assert not balance or (sample_starts is not None and sample_starts.dtype == torch.int32), (
        "a balance loss needs to know where sequences begin"
    )
    starts = sample_starts if balance else None
    sequences = 0 if starts is None else len(starts) - 1
    counts = None if starts is None else torch.empty((sequences, routing.num_experts), dtype=torch.int32)
    out = torch.empty(logits.shape, dtype=storage)
    addresses = (pointer(t) for t in (logits, experts, d_weights, starts, counts, out))
    arguments = _RouteGradArguments(
        len(logits), *addresses, _rule(routing), sequences, balance, STORAGE[storage]
    )  # fmt: skip
    submit(_route_grad, arguments, logits)
    return out


def gather_sum(
    sorted_rows: torch.Tensor,
    slots: torch.Tensor,
    shared: torch.Tensor | None,
    router: torch.Tensor | None,
    storage: torch.dtype,
) -> torch.Tensor:
    """Sums [T, N] of a token's FP32 sorted rows [T, k, N], then shared, then router (FP32 [T, N]); rounded once."""
    rows, k, width = sorted_rows.shape
    assert all(t is None or t.dtype == torch.float32 for t in (sorted_rows, shared, router)), "gather_sum sums FP32"
    out = torch.empty((rows, width), dtype=storage)
    addresses = (pointer(t) for t in (sorted_rows, slots, shared, router, out))
    submit(_gather_sum, _GatherSumArguments(rows, *addresses, width, k, STORAGE[storage]), sorted_rows)
    return out
