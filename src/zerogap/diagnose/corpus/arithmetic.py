"""Arithmetic of other stacks in plain torch: what faults compute with in place of a library call.

Every function says its order and its roundings; nothing here is used by a run. Linear: x [..., K], weight [N, K] ->
[..., N]. Attention: query [B, H, T, D], key and value [B, H_kv, S, D], mask [B, 1, T, S] to be added -> [B, T, H, D].
"""

import dataclasses
import math
from collections.abc import Callable, Iterable

import torch

Exponential = Callable[[torch.Tensor], torch.Tensor]


# ---------------------------------------------------------------------------------------------------- roundings


def truncated(x: torch.Tensor, bits: int = 16) -> torch.Tensor:
    """FP32 without the lower `bits` of each number: rounding towards zero (16: to BF16, 13: to TF32)."""
    return (x.float().view(torch.int32) & -(1 << bits)).view(torch.float32)


def tf32(x: torch.Tensor) -> torch.Tensor:
    """FP32 rounded to nearest even to the 10 stored mantissa bits of TF32."""
    code = x.float().view(torch.int32)
    return ((code + 0xFFF + ((code >> 13) & 1)) & -(1 << 13)).view(torch.float32)


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """fl(a * b + c) of FP32 numbers, rounded once: the FP64 sum is rounded to odd first, so that the second rounding
    cannot differ (Boldo and Melquiond, 2008). Products of two FP32 numbers are exact in FP64."""
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    even = (total.view(torch.int64) & 1) == 0
    odd = torch.nextafter(total, torch.where(error > 0, math.inf, -math.inf).double())
    return torch.where((error != 0) & even, odd, total).float()


def e4m3(x: torch.Tensor) -> torch.Tensor:
    """Rounded to nearest even to E4M3, saturating at +-448, as FP32."""
    return x.float().clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float()


def quantised(
    x: torch.Tensor, rows: int, columns: int, *, largest: float = 448.0, power_of_two: bool = False
) -> torch.Tensor:
    """A matrix through E4M3 codes and back, with one scale amax / `largest` per block of `rows` x `columns` (0: all).

    Args:
        power_of_two: the scale is rounded up to a power of two.
    """
    rows, columns = rows or len(x), columns or x.shape[1]
    height, width = x.shape
    padded = torch.nn.functional.pad(x.float(), (0, -width % columns, 0, -height % rows))
    blocks = padded.view(-1, rows, padded.shape[1] // columns, columns)
    scale = blocks.abs().amax((1, 3), keepdim=True) / largest
    if power_of_two:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    scale = torch.where(scale > 0, scale, torch.ones(()))
    return (e4m3(blocks / scale) * scale).view(padded.shape)[:height, :width].contiguous()


def quantised_rows(x: torch.Tensor, columns: int = 128, **options: object) -> torch.Tensor:
    """Activations [..., K] through E4M3 with one scale per token and `columns` of K, as a matrix [R, K] in FP32."""
    return quantised(x.reshape(-1, x.shape[-1]), 1, columns, **options)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------- sums


def chain(terms: Iterable[torch.Tensor], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Sum from +0, one term after the other, every partial sum rounded to `dtype`."""
    total: torch.Tensor | None = None
    for term in terms:
        total = term.to(dtype) if total is None else (total.float() + term.float()).to(dtype)
    assert total is not None, "a sum has terms"
    return total


def halving(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last axis (a power of two) by adding the upper half to the lower until one is left."""
    while x.shape[-1] > 1:
        lower, upper = x.chunk(2, -1)
        x = lower + upper
    return x[..., 0]


def adjacent(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last axis (a power of two) as a tree over adjacent pairs."""
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x[..., 0]


# ---------------------------------------------------------------------------------------------------- linear


def exact_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Accumulated in FP64 and rounded once: of BF16 operands no order shows, so rows never depend on other rows."""
    y = torch.matmul(x.double(), weight.double().t())
    return (y if bias is None else y + bias.double()).to(x.dtype)


def products(x: torch.Tensor, weight: torch.Tensor, order: Iterable[int]) -> Iterable[torch.Tensor]:
    """The FP32 outer products of columns k of x and weight, in the given order of k."""
    flat, w = x.reshape(-1, x.shape[-1]).float(), weight.float()
    for k in order:
        yield flat[:, k, None] * w[None, :, k]


def chain_linear(
    x: torch.Tensor, weight: torch.Tensor, *, descending: bool = False, fused: bool = False
) -> torch.Tensor:
    """One FP32 accumulator per output over k, by multiply and add, or by `fma`; rounded once to x's dtype."""
    keys = range(x.shape[-1] - 1, -1, -1) if descending else range(x.shape[-1])
    if not fused:
        total = chain(products(x, weight, keys))
    else:
        flat, w = x.reshape(-1, x.shape[-1]).float(), weight.float()
        total = torch.zeros(len(flat), len(w))
        for k in keys:
            total = fma(flat[:, k, None], w[None, :, k], total)
    return total.to(x.dtype).view(*x.shape[:-1], -1)


def lane_linear(x: torch.Tensor, weight: torch.Tensor, lanes: int) -> torch.Tensor:
    """`lanes` FP32 accumulators, lane = k mod lanes, multiply and add; then a halving tree; rounded once."""
    size = x.shape[-1]
    each = [chain(products(x, weight, range(lane, size, lanes))) for lane in range(lanes)]
    return halving(torch.stack(each, -1)).to(x.dtype).view(*x.shape[:-1], -1)


def split_linear(x: torch.Tensor, weight: torch.Tensor, parts: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Split-K: K in equal parts, each a library product of FP32 numbers stored as `dtype`, added ascending."""
    pieces = zip(x.float().chunk(parts, -1), weight.float().chunk(parts, -1), strict=True)
    return chain((torch.nn.functional.linear(a, b).to(dtype) for a, b in pieces), dtype).to(x.dtype)


# ---------------------------------------------------------------------------------------------------- attention


def grouped(key: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Keys or values repeated so that consecutive query heads share one."""
    return key.repeat_interleave(query.shape[1] // key.shape[1], 1)


def eager(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    *,
    cap: float | None = None,
    wide: bool = False,
) -> torch.Tensor:
    """The eager attention of transformers: scores rounded to the model's dtype, softmax FP32, probabilities rounded.

    Args:
        cap: scores become cap * tanh(scores / cap).
        wide: scores stay FP32.
    """
    key, value = grouped(key, query), grouped(value, query)
    if wide:
        query, key = query.float(), key.float()
    scores = torch.matmul(query, key.transpose(2, 3)) * scale
    if cap is not None:
        scores = torch.tanh(scores / cap) * cap
    if mask is not None:
        scores = scores + mask.to(scores.dtype)
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(value.dtype)
    return torch.matmul(weights, value).transpose(1, 2).contiguous()


def online(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    *,
    block: int,
    parts: int = 1,
    round_probabilities: bool = True,
    power: Exponential = torch.exp,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Flash-style: unrounded scores, key blocks ascending with a running maximum; probabilities rounded to the model's
    dtype before the value product; one division at the end; rounded once.

    Args:
        block: keys per block.
        parts: equal spans of keys, each computed so, merged ascending by their maxima (flash-decoding).
        power: the exponential.
        dtype: of scores, sums and merges.
    """
    key, value = grouped(key, query), grouped(value, query)
    size = -(-key.shape[2] // parts)
    merged: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    for start in range(0, key.shape[2], size):
        cut = slice(start, start + size)
        seen = None if mask is None else mask[..., cut] > -1e4
        span = _Span(query.to(dtype), scale, power, query.dtype if round_probabilities else dtype)
        top, total, out = span.run(key[:, :, cut].to(dtype), value[:, :, cut].to(dtype), seen, block)
        if merged is None:
            merged = top, total, out
            continue
        peak = torch.maximum(merged[0], top)
        old, new = power(merged[0] - peak), power(top - peak)
        merged = peak, merged[1] * old + total * new, merged[2] * old + out * new
    assert merged is not None, "there are keys"
    total = torch.where(merged[1] > 0, merged[1], 1.0)  # a padded row sees nothing
    return (merged[2] / total).to(query.dtype).transpose(1, 2).contiguous()


@dataclasses.dataclass(frozen=True)
class _Span:
    """Queries that attend to a span of keys, block by block."""

    query: torch.Tensor
    scale: float
    power: Exponential
    probabilities: torch.dtype

    def run(
        self, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor | None, block: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(maximum, sum, unnormalised output); keys that are not `seen` by a row do not touch it."""
        query = self.query
        top = torch.full((*query.shape[:3], 1), -1e30, dtype=query.dtype)
        total, out = torch.zeros_like(top), torch.zeros_like(query)
        for start in range(0, key.shape[2], block):
            cut = slice(start, start + block)
            scores = torch.matmul(query, key[:, :, cut].transpose(2, 3)) * self.scale
            if seen is not None:
                scores = scores.masked_fill(~seen[..., cut], -math.inf)
            peak = torch.maximum(top, scores.amax(-1, keepdim=True))
            alpha, weights = self.power(top - peak), self.power(scores - peak)
            total = total * alpha + weights.sum(-1, keepdim=True)
            weights = weights.to(self.probabilities).to(query.dtype)
            out = out * alpha + torch.matmul(weights, value[:, :, cut])
            top = peak
        return top, total, out


def exact_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    parts: int = 1,
) -> torch.Tensor:
    """`online` in blocks of 64 with all sums in FP64: of BF16 operands no order shows in BF16 results, so a row depends
    on its own keys alone."""
    return online(query, key, value, mask, scale, block=64, parts=parts, dtype=torch.float64)
