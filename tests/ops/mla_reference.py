"""Latent attention, literally in numpy over latent rows; and in its expanded form in float64, with a derived bound.

`LatentContract` is the contract of ops/mla.py between the products of `kv_b`, operation by operation; codes and scales
are made as in attention_fp8_reference.py. `expanded` shares no step with the latent form: keys and values of every head
are expanded from the latent, and torch's autograd differentiates. `bounds` follows the latent form's roundings.
"""

import dataclasses

import numpy as np
import torch

from tests.ops.attention_fp8_reference import VALUES, codes_of, scales_of
from tests.ops.attention_reference import F32, TILE, Contract, _tree, flush
from tests.ops.mla_cases import EPS, Case, table
from zerogap.ops.cpu import library

LATENT_TILE = 128


@dataclasses.dataclass(frozen=True)
class LatentContract(Contract):
    """`given`: calibrated scales [tiles]. The last three are wrong on purpose, for controls."""

    coded: bool = False
    pow2: bool = False
    given: np.ndarray | None = None
    rope_first: bool = False
    tiles_descend: bool = False
    scale_after: bool = False  # of a value tile: PV times one scale per block instead of p times each key's

    @classmethod
    def of(cls, case: Case, **changes: object) -> "LatentContract":
        fused, given = not library.backend().endswith("portable"), case.given
        return cls(
            case.dtype == "bf16",
            fused,
            kv_split=case.kv_split,
            coded=case.kv != "dense",
            pow2=case.scale_format == "pow2",
            given=None if given is None else given.numpy(),
            **changes,
        )

    def tiles(self, latent: int) -> list[slice]:
        return [slice(begin, min(begin + LATENT_TILE, latent)) for begin in range(0, latent, LATENT_TILE)]

    def quantise(self, latent: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """[T, L] -> grid values, scales [T, tiles], which elements are clipped. Dense: the rows, ones, none."""
        tiles = self.tiles(latent.shape[1])
        grid, scales = latent.copy(), np.ones((len(latent), len(tiles)), F32)
        clipped = np.zeros(latent.shape, bool)
        for t, columns in enumerate(tiles if self.coded else []):
            part = latent[:, columns]
            scales[:, t] = scales_of(part, self.pow2) if self.given is None else self.given[t]
            grid[:, columns] = VALUES[codes_of(part, scales[:, t])]
            clipped[:, columns] = (np.abs(part / scales[:, t, None]) > 448) & (self.given is not None)
        return grid, scales, clipped

    def scaled_dots(self, a: np.ndarray, grid: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """a [T, L] against the latents of all keys, tile by tile, [T, keys]."""
        zeros = np.zeros((len(a), len(grid)), F32)
        if not self.coded:
            return self.chain(a[:, None, :], grid[None], zeros)
        total, tiles = zeros, list(enumerate(self.tiles(grid.shape[1])))
        for t, columns in reversed(tiles) if self.tiles_descend else tiles:
            dot = self.chain(a[:, None, columns], grid[None][..., columns], zeros)
            total = self.fma(dot, scales[None, :, t], total)
        return total

    def latent_scores(self, q: np.ndarray, grid, rope, scales, scale: float) -> np.ndarray:
        """q [T, L + R] -> fl(s * scale) [T, keys]."""
        latent, zeros = grid.shape[1], np.zeros((len(q), len(grid)), F32)
        if not self.coded:
            parts = [(q[:, :latent], grid), (q[:, latent:], rope)]
            for a, b in reversed(parts) if self.rope_first else parts:
                zeros = self.chain(a[:, None, :], b[None], zeros)
            return flush(zeros * F32(scale))
        total = self.scaled_dots(q[:, :latent], grid, scales)
        total = flush(total + self.chain(q[:, None, latent:], rope[None], zeros))
        return flush(total * F32(scale))

    def one_head(self, q, grid, rope, scales, scale: float) -> tuple[np.ndarray, np.ndarray]:
        """One head of one sequence, rows at positions 0 .. T-1 -> out [T, L], lse [T]."""
        count, latent = len(q), grid.shape[1]
        padded = -(-count // self.block) * self.block
        s = np.full((count, padded), -np.inf, F32)
        s[:, :count] = self.latent_scores(q, grid, rope, scales, scale)
        visible = np.arange(padded)[None, :] <= np.arange(count)[:, None]
        s[~visible] = -np.inf
        grid = np.concatenate([grid, np.zeros((padded - count, latent), F32)])
        scales = np.concatenate([scales, np.ones((padded - count, scales.shape[1]), F32)])
        state = merged = (np.zeros(count, F32), np.zeros(count, F32), np.zeros((count, latent), F32))
        for begin in range(0, padded, self.block):
            rows, keys = np.arange(count) >= begin, slice(begin, begin + self.block)
            first = begin % self.kv_split == 0
            if first and begin:
                merged = self._select(rows, self._merge(merged, state, begin == self.kv_split), merged)
            after = self.latent_block(state, s[:, keys], grid[keys], scales[keys], visible[:, keys], first)
            state = self._select(rows, after, state)
        m, l, o = self._select(np.arange(count) >= self.kv_split, self._merge(merged, state, False), state)
        return self.rn(flush(o / l[:, None])), m + self.log(l)

    def latent_block(self, state: tuple, s, grid, scales, visible, first: bool) -> tuple:
        m, l, o = state
        top = s.max(-1)
        new_m = np.where(np.isfinite(top), top if first else np.maximum(m, top), F32(0))
        p = np.where(visible, self.exp(np.where(visible, s - new_m[:, None], F32(0))), F32(0))
        product = np.zeros_like(o)
        for t, columns in enumerate(self.tiles(grid.shape[1])):
            x = flush(p * scales[None, :, t]) if self.coded and not self.scale_after else p
            zeros = np.zeros((len(s), columns.stop - columns.start), F32)
            made = self.chain(self.rn(x)[:, None, :], grid[:, columns].T[None], zeros, visible[:, None, :])
            product[:, columns] = flush(made * scales[0, t]) if self.scale_after else made
        if first:
            return new_m, self.lane_sum(p), product
        alpha = self.exp(np.minimum(m - new_m, F32(0)))
        return new_m, self.fma(l, alpha, self.lane_sum(p)), self.fma(o, alpha[:, None], product)

    def forward(self, q, latent, rope, scale: float) -> tuple[np.ndarray, np.ndarray]:
        """One sequence: q [T, h, L + R], latent [T, L], rope [T, R] -> out [T, h, L], lse [T, h]."""
        grid, scales, _ = self.quantise(latent)
        parts = [self.one_head(q[:, h], grid, rope, scales, scale) for h in range(q.shape[1])]
        return np.stack([p[0] for p in parts], 1), np.stack([p[1] for p in parts], 1)

    def backward(self, q, latent, rope, out, lse, d_out, leaves: int, scale: float) -> tuple[np.ndarray, ...]:
        """One sample: gradients of q [T, h, L + R], latent and rope."""
        grid, scales, clipped = self.quantise(latent)
        count, heads, width = q.shape
        size = latent.shape[1]
        dq, sums = np.zeros_like(q), {}
        tile_of = np.arange(count) // TILE
        below = tile_of[None, :] <= tile_of[:, None]
        causal = np.tril(np.ones((count, count), bool))
        for h in range(heads):
            delta = np.zeros((count, 16), F32)
            for i in range(0, size, 16):
                delta = self.fma(out[:, h, i : i + 16], d_out[:, h, i : i + 16], delta)
            s = self.latent_scores(q[:, h], grid, rope, scales, scale)
            p = np.where(causal, self.exp(np.where(causal, s - lse[:, h, None], F32(0))), F32(0))
            dp = self.scaled_dots(d_out[:, h], grid, scales)
            ds = flush(flush(p * (dp - self.lane_sum(delta)[:, None])) * F32(scale))
            ds = np.where(causal, ds, F32(0))
            live = below.T[:, None, :]
            dk, dv = sums.get((0, h * leaves // heads), (np.zeros((count, width), F32), np.zeros((count, size), F32)))
            sums[0, h * leaves // heads] = (
                self.chain(self.rn(ds).T[:, None, :], q[:, h].T[None], dk, live),
                self.chain(self.rn(p).T[:, None, :], d_out[:, h].T[None], dv, live),
            )
            for t, columns in [*enumerate(self.tiles(size)), (-1, slice(size, width))]:
                to_q = flush(ds * scales[None, :, t]) if self.coded and t >= 0 else ds
                keys = grid[:, columns] if t >= 0 else rope
                zeros = np.zeros((count, keys.shape[1]), F32)
                chain = self.chain(self.rn(to_q)[:, None, :], keys.T[None], zeros, below[:, None, :])
                dq[:, h, columns] = self.rn(chain)
        dk, dv = (_tree(sums, 0, i, 0, leaves) for i in (0, 1))
        d_latent = np.where(clipped, F32(0), self.rn(flush(dk[:, :size] + dv)))
        return dq, d_latent, self.rn(dk[:, size:])


# ---------------------------------------------------------------------------------------------- float64


def rotated(case: Case, x: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """Rows [T, ..., rope] turned by their positions 0 .. T-1, with the magnitudes that its error grows with."""
    half = case.sizes.rope // 2
    cos, sin = (t.view(len(x), *[1] * (x.dim() - 2), half) for t in table(2 * half)[: len(x)].double().split(half, -1))
    sin = -sin if inverse else sin
    if case.interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    a, b = x.split(half, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


@dataclasses.dataclass(frozen=True)
class Expanded:
    """One sequence in float64: results by name, and the values that `bounds` needs."""

    results: dict[str, torch.Tensor]
    parts: dict[str, torch.Tensor]


def expanded(
    case: Case, q, kv_a, weights, d_out, seen: tuple[torch.Tensor, torch.Tensor] | None = None, eps: float = EPS
) -> Expanded:
    """Expanded form: k_nope and v of every head from the latent, plain attention, gradients by autograd.

    `seen`: FP8: (value of the codes, which elements are clipped) [T, latent]; the gradient is straight through.
    """
    s, count = case.sizes, len(q)
    q, kv_a = (x.detach().double().requires_grad_() for x in (q, kv_a))
    gain, kv_b = (w.value().double().requires_grad_() for w in weights)
    x = kv_a[:, : s.latent]
    c = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * gain
    if seen is not None:
        c = seen[0] + (c - c.detach()) * ~seen[1]
    k_rope = rotated(case, kv_a[:, s.latent :])
    heads = q.view(count, s.num_heads, -1)
    both = torch.cat([heads[..., : s.nope], rotated(case, heads[..., s.nope :])], -1).transpose(0, 1)
    kv = (c @ kv_b.T).view(count, s.num_heads, -1).transpose(0, 1)
    keys = torch.cat([kv[..., : s.nope], k_rope.expand(s.num_heads, -1, -1)], -1)
    hidden = torch.ones(count, count).triu(1).bool()
    p = ((both @ keys.mT) * case.scale).masked_fill(hidden, -torch.inf).softmax(-1)
    out = (p @ kv[..., s.nope :]).transpose(0, 1).reshape(count, -1)
    out.backward(d_out.double())
    results = {"out": out, "dq": q.grad, "dkv_a": kv_a.grad, "dnorm": gain.grad, "dkv_b": kv_b.grad}
    parts = {"q": q, "kv_a": kv_a, "gain": gain, "kv_b": kv_b, "c": c, "k_rope": k_rope, "p": p, "d_out": d_out}
    return Expanded({n: x.detach() for n, x in results.items()}, {n: x.detach().double() for n, x in parts.items()})


U32, EXP = 2.0**-24, 2.0e-7  # largest relative error of an FP32 rounding; of the exp polynomial


@dataclasses.dataclass(frozen=True)
class Near:
    """A float64 value and how far a computed one may be from it, to first order."""

    value: torch.Tensor
    error: torch.Tensor

    @classmethod
    def exact(cls, value: torch.Tensor) -> "Near":
        return cls(value, torch.zeros_like(value))

    @property
    def most(self) -> torch.Tensor:
        return self.value.abs() + self.error

    def rounded(self, unit: float) -> "Near":
        return Near(self.value, self.error + unit * self.most)

    def __matmul__(self, other: "Near") -> "Near":
        """A chain over the inner axis, a rounding per element and four to spare (scales, joining tiles)."""
        error = self.error @ other.most + self.value.abs() @ other.error
        steps = self.value.shape[-1] + 4
        return Near(self.value @ other.value, error + steps * U32 * (self.most @ other.most))

    def __add__(self, other: "Near") -> "Near":
        return Near(self.value + other.value, self.error + other.error).rounded(U32)

    def __getitem__(self, index: object) -> "Near":
        return Near(self.value[index], self.error[index])

    def map(self, function) -> "Near":
        """A rearrangement of elements."""
        return Near(function(self.value), function(self.error))

    @property
    def mT(self) -> "Near":
        return self.map(lambda x: x.mT)


def turned(case: Case, x: Near, unit: float, inverse: bool = False) -> Near:
    """Rotation of [T, ..., rope]: |cos|, |sin| <= 1, so that an element errs by what both of its pair do."""

    def of_pair(magnitudes: torch.Tensor) -> torch.Tensor:
        both = magnitudes.unflatten(-1, (-1, 2) if case.interleaved else (2, -1))
        axis = -1 if case.interleaved else -2
        return both.sum(axis, keepdim=True).expand_as(both).flatten(-2)

    error = of_pair(x.error) + 2 * U32 * of_pair(x.most)
    return Near(rotated(case, x.value, inverse), error).rounded(unit)


def attention_bounds(case: Case, q: Near, keys: Near, values: Near, d_out: Near, p: torch.Tensor) -> dict[str, Near]:
    """As in test_attention.py, per head [h, T, ...] over shared keys and values, with errors of all operands.

    s errs by delta, so p = exp(s - m) by a factor 1 +- (2 delta + exp + its storage rounding); the softmax weights sum
    to one, so numerator and denominator err alike.
    """
    rn = 2.0**-8 if case.dtype == "bf16" else 0.0
    count, blocks = p.shape[-1], p.shape[-1] // 64 + 1
    dots = q @ keys.mT
    hidden = p == 0
    delta_s = (dots.rounded(2 * U32).error * case.scale).masked_fill(hidden, 0).amax(-1, keepdim=True)
    wiggle = 2 * (2 * delta_s + EXP * (blocks + 1)) + (count + 3 * blocks + 6) * U32
    o = p @ values.value
    o_error = (p @ values.value.abs()) * (wiggle + rn) + p @ values.error + o.abs() * (wiggle + rn)
    size = (dots.value * case.scale).masked_fill(hidden, 0).abs().amax(-1, keepdim=True) + np.log(count) + 1
    p_error = 2 * delta_s + wiggle + EXP + 3 * size * U32
    delta = (d_out.value * o).sum(-1, keepdim=True)
    delta_error = (d_out.most * o_error + d_out.error * o.abs()).sum(-1, keepdim=True)
    delta_error = delta_error + (values.value.shape[-1] + 1) * U32 * (d_out.value * o).abs().sum(-1, keepdim=True)
    dp = d_out @ values.mT
    ds = p * (dp.value - delta) * case.scale
    ds_error = p * case.scale * ((dp.value - delta).abs() * (p_error + 4 * U32) + dp.error + delta_error)
    near_ds, near_p = Near(ds, ds_error).rounded(rn), Near(p, p * p_error).rounded(rn)

    def over_heads(x: Near) -> Near:  # chains and trees over heads
        total = x.most.sum(0)
        return Near(x.value.sum(0), x.error.sum(0) + p.shape[0] * U32 * total)

    return {
        "o": Near(o, o_error),
        "dq": (near_ds @ keys).rounded(rn),
        "dk": over_heads(near_ds.mT @ q),
        "dv": over_heads(near_p.mT @ d_out),
    }


def bounds(case: Case, made: Expanded, clipped: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """First-order error bound of each result of `expanded`, from the roundings of the latent form.

    `clipped`: over codes, as `expanded` got it; the latent is exact then.
    """
    s, v, rn = case.sizes, made.parts, 2.0**-8 if case.dtype == "bf16" else 0.0
    count, heads, latent, nope = len(v["q"]), s.num_heads, s.latent, s.nope
    up = v["kv_b"].view(heads, nope + s.value, latent)
    up_k, up_v = Near.exact(up[:, :nope]), Near.exact(up[:, nope:])
    squares = latent / 16 + 6  # roundings of a lane sum
    c = Near.exact(v["c"])
    if clipped is None:
        c = c.rounded((squares / 2 + 4) * U32).rounded(rn)
    k_rope = turned(case, Near.exact(v["kv_a"][:, latent:]), rn)
    keys = Near(torch.cat([c.value, k_rope.value], -1), torch.cat([c.error, k_rope.error], -1))
    q = Near.exact(v["q"].view(count, heads, -1))
    q_nope = q[..., :nope].map(lambda x: x.transpose(0, 1))
    q_abs = (q_nope @ up_k).rounded(rn)
    q_rope = turned(case, q[..., nope:], rn).map(lambda x: x.transpose(0, 1))
    q_full = Near(torch.cat([q_abs.value, q_rope.value], -1), torch.cat([q_abs.error, q_rope.error], -1))
    d_out = Near.exact(v["d_out"].view(count, heads, -1).transpose(0, 1))
    d_lat = (d_out @ up_v).rounded(rn)
    part = attention_bounds(case, q_full, keys, c, d_lat, v["p"])
    out = (part["o"] @ up_v.mT).rounded(rn)
    dq_abs = part["dq"][..., :latent]
    dq_nope = (dq_abs @ up_k.mT).rounded(rn).map(lambda x: x.transpose(0, 1))
    dq_rope = turned(case, part["dq"][..., latent:].map(lambda x: x.transpose(0, 1)), rn, inverse=True)
    d_c = (part["dk"][:, :latent] + part["dv"]).rounded(rn)
    if clipped is not None:
        d_c = d_c.map(lambda x: x * ~clipped)
    d_k_rope = turned(case, part["dk"][:, latent:].rounded(rn), rn, inverse=True)
    # the norm's backward: dx = (g - n cbar) inv, g = d_c w, cbar = mean(g n); n and inv err relatively by `unit`
    x = v["kv_a"][:, :latent]
    inv = (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
    n, unit = x * inv, (squares / 2 + 4) * U32
    g = Near(d_c.value * v["gain"], d_c.error * v["gain"].abs()).rounded(U32)
    cbar = (g.value * n).mean(-1, keepdim=True)
    cbar_error = (g.error * n.abs() + (unit + squares * U32) * g.most * n.abs()).mean(-1, keepdim=True)
    dx_error = (g.error + n.abs() * (cbar_error + (unit + 4 * U32) * cbar.abs())) + (unit + 4 * U32) * g.most
    dx = Near((g.value - n * cbar) * inv, dx_error * inv).rounded(rn)
    rows = (count + 4) * U32
    d_up_k = q_nope.mT @ dq_abs
    d_up_v = d_out.mT @ part["o"]
    return {
        "out": out.error.transpose(0, 1).reshape(count, -1),
        "dq": torch.cat([dq_nope.error, dq_rope.error], -1).reshape(count, -1),
        "dkv_a": torch.cat([dx.error, d_k_rope.error], -1),
        "dnorm": (d_c.error * n.abs() + (rows + unit) * d_c.most * n.abs()).sum(0),
        "dkv_b": torch.cat([d_up_k.error, d_up_v.error], 1).reshape(-1, latent),
    }
