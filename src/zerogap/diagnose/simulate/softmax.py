"""Softmax and value product of attention over spans of keys: states of a maximum, a sum and an output, and how several
become one. Fields of the variants are those of `attention`.
"""

import dataclasses
from collections.abc import Callable

import torch

from zerogap.diagnose.simulate import arithmetic, dots
from zerogap.diagnose.simulate.arithmetic import FP32, fma, round_to
from zerogap.diagnose.simulate.variant import Variant

LOG2E = 1.4426950408889634
FLASH = "torch flash exp"
BACKWARDS, RECIPROCAL = ", backwards", ", reciprocal"


def product(x: torch.Tensor, w: torch.Tensor, order: str, storage: str, rounded: bool) -> torch.Tensor:
    """[H, M, K] times [H, N, K]: FP32 [H, M, N]; `rounded`: to the storage dtype, as a library's narrow product is."""
    if order.startswith("chain"):
        dtype = torch.bfloat16 if storage == "bf16" and _is_bf16(x) and _is_bf16(w) else FP32
        found = torch.stack([dots.native(a.to(dtype), b.to(dtype)) for a, b in zip(x, w)])
        return round_to(found, storage) if rounded else found
    if rounded and storage != "fp32":
        narrow = arithmetic.DTYPES[storage]
        return torch.matmul(x.to(narrow)[None], w.to(narrow)[None].transpose(-1, -2))[0].to(FP32)
    return torch.matmul(x.to(FP32), w.to(FP32).transpose(-1, -2))


def _is_bf16(x: torch.Tensor) -> bool:
    return x.dtype == torch.bfloat16 or bool((x == x.to(torch.bfloat16).to(x.dtype)).all())


def exponential(x: torch.Tensor, primitive: str) -> torch.Tensor:
    if primitive.startswith("contract exp"):
        return arithmetic.exp(x.clamp_max(0))
    if primitive == FLASH:
        return torch.exp(x)
    if primitive.startswith("exp2"):
        return torch.exp2(x * torch.tensor(LOG2E, dtype=FP32))
    return torch.exp(x)


@dataclasses.dataclass
class State:
    """Maximum [H, T], sum [H, T] and unnormalised output [H, T, D] so far."""

    m: torch.Tensor
    l: torch.Tensor
    o: torch.Tensor


def spans(split: str, count: int) -> list[tuple[int, int]]:
    words = split.replace(",", "").split()
    if split == "1":
        return [(0, count)]
    size = int(words[2]) if words[0] == "spans" else -(-count // int(words[0]))
    return [(i, min(i + size, count)) for i in range(0, count, size)]


def span(
    scores: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    begin: int,
    end: int,
    variant: Variant,
    storage: str,
    heads: list[int],
) -> State:
    """The state after keys begin .. end - 1; rows that see none of them have maximum -inf, sum and output 0."""
    block = end - begin if variant["block"] == "all keys" else int(variant["block"].split()[0])
    rows = scores.shape[:2]
    state = State(torch.full(rows, float("-inf")), torch.zeros(rows), torch.zeros(*rows, v.shape[-1]))
    sink = sinks(variant, heads)
    if sink is not None and begin == 0:
        state.m, state.l = sink[:, None].expand(rows).clone(), torch.ones(rows)
    exact, untouched = variant["order"].startswith("chain"), not bool(state.l.any())
    blocks = range(begin, end, block)
    for first in blocks[::-1] if variant["order"].endswith(BACKWARDS) else blocks:
        keys = slice(first, min(first + block, end))
        s, seen = scores[..., keys], visible[:, keys]
        m = torch.maximum(state.m, s.amax(-1))
        safe = torch.where(m.isfinite(), m, 0.0)
        p = torch.where(seen, exponential(torch.where(seen, s - safe[..., None], 0.0), variant["primitive"]), 0.0)
        if variant["primitive"] == FLASH:
            shifted = torch.where(seen, s - safe[..., None], float("-inf"))
            p, total = _flash(shifted, keys.start, arithmetic.fast_exp if storage == "fp32" else arithmetic.faster_exp)
        elif exact:
            total = arithmetic.halving(arithmetic.lanes(p, torch.ones_like(p), 16, False))
        else:
            total = p.sum(-1)
        if "normalised P" in variant["rounding"]:
            p = p / torch.where(total > 0, total, 1.0)[..., None]
        kept = round_to(p, storage) if variant["rounding"].endswith("P") else p
        values = product(kept, v[:, keys].transpose(-1, -2), variant["order"], storage, False)
        live = seen.any(-1)[None].expand(rows)
        if untouched:  # 0 * 0 + x, which is x but for the sign of a zero
            l, o = total + 0.0, values + 0.0
            untouched = False
        elif exact:
            alpha = _decay(state.m, safe, variant["primitive"])
            l, o = fma(state.l, alpha, total), fma(state.o, alpha[..., None].expand_as(values), values)
        else:
            alpha = _decay(state.m, safe, variant["primitive"])
            l, o = state.l * alpha + total, state.o * alpha[..., None] + values
        if variant["accumulate"] == "bf16":
            o = round_to(o, "bf16")
        state = State(
            torch.where(live, m, state.m), torch.where(live, l, state.l), torch.where(live[..., None], o, state.o)
        )
    if variant["accumulate"] == "bf16 parts" and not variant["split"].endswith("normalised"):
        state.o = round_to(state.o, "bf16")
    return state


def sinks(variant: Variant, heads: list[int]) -> torch.Tensor | None:
    """Score of one more key of each head, FP32; None where the formula has none."""
    words = variant["formula"].split()
    if words[0] not in ("sink", "sinks"):
        return None
    scores = [float(n) for n in words[1:]] or [0.0]
    return torch.tensor([scores[h] if len(scores) > 1 else scores[0] for h in heads], dtype=FP32)


def _decay(before: torch.Tensor, m: torch.Tensor, primitive: str) -> torch.Tensor:
    """What a state under the maximum `before` is multiplied by under m; 0 where it has seen nothing."""
    return torch.where(before.isfinite(), exponential((before - m).clamp_max(0), primitive), 0.0)


def _flash(
    x: torch.Tensor, begin: int, exp: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """exp and its sum over one block of keys from `begin`, as torch's CPU flash kernel has them.

    Query rows stand in blocks of 32, 64 (from 192 rows on) or 256 (from 768); a block reads keys up to its last row's.
    Whole vectors of 16 take the fast exp and are summed in lanes, then by halves; the rest takes exp, one by one.
    """
    count, width = x.shape[1:]
    size = 256 if count >= 768 else 64 if count >= 192 else 32
    p, total = torch.zeros_like(x), torch.zeros(x.shape[:2])
    for first in range(0, count, size):
        rows = slice(first, min(first + size, count))
        keys = max(0, min(width, min(first + size, count) - begin))
        vectors = keys // 16 * 16
        p[:, rows, :vectors] = exp(x[:, rows, :vectors])
        p[:, rows, vectors:keys] = torch.exp(x[:, rows, vectors:keys].double()).to(FP32)  # the C library's
        if vectors:
            head = p[:, rows, :vectors]
            total[:, rows] = arithmetic.halving(arithmetic.lanes(head, torch.ones_like(head), 16, False))
        for i in range(vectors, keys):
            total[:, rows] = total[:, rows] + p[:, rows, i]
    return p, total


def merge(left: State, right: State, variant: Variant) -> State:
    """`o = fma(o1, a1, o2 * a2)`, and the same for the sums; a side that saw no key changes nothing."""
    m = torch.maximum(left.m, right.m)
    one, two = (
        torch.where(s.m.isfinite(), exponential(torch.where(m.isfinite(), s.m - m, 0.0), variant["primitive"]), 0.0)
        for s in (left, right)
    )
    far = right.o * two[..., None]
    l = fma(left.l, one, right.l * two)
    o = fma(left.o, one[..., None].expand_as(far), far)
    unseen = ~right.m.isfinite()
    return State(m, torch.where(unseen, left.l, l), torch.where(unseen[..., None], left.o, o))


def by_logsumexp(states: list[State], variant: Variant) -> torch.Tensor:
    """Outputs of parts, each normalised, weighted by exp(lse - largest lse) (flash decoding's second kernel)."""
    sums = torch.stack([torch.where(s.l > 0, s.m + torch.log(s.l.clamp_min(1e-38)), float("-inf")) for s in states])
    divided = "normalised P" in variant["rounding"]
    outs = torch.stack([torch.where(s.l[..., None] > 0, s.o if divided else s.o / s.l[..., None], 0.0) for s in states])
    if variant["accumulate"] == "bf16 parts":
        outs = round_to(outs, "bf16")
    weights = torch.exp(sums - sums.amax(0))
    return (weights[..., None] * outs).sum(0) / weights.sum(0)[..., None]
