"""Attention over FP8 pages, literally in numpy, and in float64 with a derived bound.

Codes are made by comparison of exact distances (`nearest_codes`), scales by float64 arithmetic; neither shares a step
with the kernels. What follows is the contract of ops/attention.py, operation by operation.
"""

import dataclasses

import numpy as np
import torch

from tests.ops.attention_reference import F32, TILE, Contract, _tree, flush
from tests.ops.test_quant import code_values, nearest_codes

VALUES = code_values().astype(F32)


def scales_of(x: np.ndarray, pow2: bool) -> np.ndarray:
    """FP32 scales of blocks [..., D]: fl32(amax / 448) or the next power of two, 1 where the block counts as zero."""
    amax = np.abs(x.astype(np.float64)).max(-1)
    scale = (amax / 448).astype(F32)
    if pow2:
        mantissa, exponent = np.frexp(scale)
        scale = np.where(mantissa == 0.5, scale, np.ldexp(F32(1), exponent)).astype(F32)
    scale = np.where(amax < 2.0**-100, F32(1), scale)
    return np.where(np.isfinite(amax), scale, F32("nan")).astype(F32)


def codes_of(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """uint8 codes of FP32 x [..., D] by scales [...]; 0x7f where x or the scale is not finite."""
    with np.errstate(all="ignore"):
        y = flush(flush(x) / scale[..., None])
        bad = ~np.isfinite(x) | np.isnan(scale)[..., None]
    return np.where(bad, 0x7F, nearest_codes(np.where(bad, F32(0), y))).astype(np.uint8)


@dataclasses.dataclass(frozen=True)
class FP8Contract(Contract):
    """`given`: calibrated scales [Hk] of keys and values. The other two changes are wrong on purpose, for controls."""

    pow2: bool = False
    math: bool = False
    given: tuple[np.ndarray, np.ndarray] | None = None
    scale_first: bool = False  # scores: dot * fl(k_scale * scale)
    unscaled_p: bool = False  # l from the probabilities times the scales of the values

    def quantise(self, x: np.ndarray, given: F32 | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """[T, D] -> grid values, scales [T], which elements are clipped."""
        scale = scales_of(x, self.pow2) if given is None else np.full(len(x), given, F32)
        clipped = (np.abs(x / scale[:, None]) > 448) & (given is not None)
        return VALUES[codes_of(x, scale)], scale, clipped

    def operands(self, k: np.ndarray, v: np.ndarray, head: int) -> tuple[np.ndarray, ...]:
        """(k grid, k scales, k clipped, v grid, v scales, v clipped) of one KV head."""
        given = (None, None) if self.given is None else (self.given[0][head], self.given[1][head])
        return *self.quantise(k, given[0]), *self.quantise(v, given[1])

    def scaled_scores(self, q: np.ndarray, k: np.ndarray, k_scale: np.ndarray, scale: float) -> np.ndarray:
        """fl(fl(dot * k_scale) * scale) [T, T]; FP8 operands: dot of codes, times fl(q_scale * k_scale)."""
        factor = np.broadcast_to(k_scale[None, :], (len(q), len(k)))
        if self.math:
            q, q_scale, _ = self.quantise(q)
            factor = q_scale[:, None] * k_scale[None, :]
        dots = self.chain(q[:, None, :], k[None, :, :], np.zeros((len(q), len(k)), F32))
        if self.scale_first:
            return flush(dots * flush(factor * F32(scale)))
        return flush(flush(dots * factor) * F32(scale))

    def one_head(self, q, operands: tuple, scale: float) -> tuple[np.ndarray, np.ndarray]:
        """One head of one sequence, rows at positions 0 .. T-1."""
        k, k_scale, _, v, v_scale, _ = operands
        count, dim = q.shape
        padded = -(-count // self.block) * self.block
        s = np.full((count, padded), -np.inf, F32)
        s[:, :count] = self.scaled_scores(q, k, k_scale, scale)
        visible = np.arange(padded)[None, :] <= np.arange(count)[:, None]
        s[~visible] = -np.inf
        v = np.concatenate([v, np.zeros((padded - count, dim), F32)])
        v_scale = np.concatenate([v_scale, np.ones(padded - count, F32)])
        state = merged = (np.zeros(count, F32), np.zeros(count, F32), np.zeros((count, dim), F32))
        for begin in range(0, padded, self.block):
            rows, keys = np.arange(count) >= begin, slice(begin, begin + self.block)
            first = begin % self.kv_split == 0
            if first and begin:
                merged = self._select(rows, self._merge(merged, state, begin == self.kv_split), merged)
            after = self.scaled_block(state, s[:, keys], v[keys], v_scale[keys], visible[:, keys], first)
            state = self._select(rows, after, state)
        m, l, o = self._select(np.arange(count) >= self.kv_split, self._merge(merged, state, False), state)
        return self.rn(flush(o / l[:, None])), m + self.log(l)

    def scaled_block(self, state: tuple, s, v, v_scale, visible, first: bool) -> tuple:
        m, l, o = state
        top = s.max(-1)
        new_m = np.where(np.isfinite(top), top if first else np.maximum(m, top), F32(0))
        p = np.where(visible, self.exp(np.where(visible, s - new_m[:, None], F32(0))), F32(0))
        x = flush(p * v_scale)
        total = self.lane_sum(x if self.unscaled_p else p)
        p_scale = np.ones(len(s), F32)
        if self.math:
            p_scale = scales_of(x, self.pow2)
            x = VALUES[codes_of(x, p_scale)]
        product = self.chain(self.rn(x)[:, None, :], v.T[None], np.zeros_like(o), visible[:, None, :])
        if first:
            return new_m, total, flush(product * p_scale[:, None])
        alpha = self.exp(np.minimum(m - new_m, F32(0)))
        if self.math:
            o = self.fma(product, p_scale[:, None], flush(o * alpha[:, None]))
        else:
            o = self.fma(o, alpha[:, None], product)
        return new_m, self.fma(l, alpha, total), o

    def forward(self, q, k, v, heads: int, kv_heads: int, scale: float) -> tuple[np.ndarray, np.ndarray]:
        group = heads // kv_heads
        operands = [self.operands(k[:, g], v[:, g], g) for g in range(kv_heads)]
        parts = [self.one_head(q[:, h], operands[h // group], scale) for h in range(heads)]
        return np.stack([p[0] for p in parts], 1), np.stack([p[1] for p in parts], 1)

    def backward(self, q, k, v, out, lse, d_out, leaves: int, scale: float) -> tuple[np.ndarray, ...]:
        count, heads, dim = q.shape
        kv_heads = k.shape[1]
        group, per_leaf = heads // kv_heads, heads // leaves
        operands = [self.operands(k[:, g], v[:, g], g) for g in range(kv_heads)]
        dq, sums = np.zeros_like(q), {}
        tile_of = np.arange(count) // TILE
        below = tile_of[None, :] <= tile_of[:, None]
        causal = np.tril(np.ones((count, count), bool))
        for h in range(heads):
            g = h // group
            k_grid, k_scale, _, v_grid, v_scale, _ = operands[g]
            delta = np.zeros((count, 16), F32)
            for i in range(0, dim, 16):
                delta = self.fma(out[:, h, i : i + 16], d_out[:, h, i : i + 16], delta)
            s = self.scaled_scores(q[:, h], k_grid, k_scale, scale)
            p = np.where(causal, self.exp(np.where(causal, s - lse[:, h, None], F32(0))), F32(0))
            dp = self.chain(d_out[:, h, None, :], v_grid[None], np.zeros((count, count), F32))
            dp = flush(dp * v_scale[None, :])
            ds = flush(flush(p * (dp - self.lane_sum(delta)[:, None])) * F32(scale))
            ds = np.where(causal, ds, F32(0))
            zeros, live = np.zeros((count, dim), F32), below.T[:, None, :]
            to_q = self.rn(flush(ds * k_scale[None, :]))
            dq[:, h] = self.rn(self.chain(to_q[:, None, :], k_grid.T[None], zeros, below[:, None, :]))
            dk, dv = sums.get((g, h // per_leaf), (zeros, zeros))
            sums[g, h // per_leaf] = (
                self.chain(self.rn(ds).T[:, None, :], q[:, h].T[None], dk, live),
                self.chain(self.rn(p).T[:, None, :], d_out[:, h].T[None], dv, live),
            )
        grads = []
        for i in (0, 1):
            totals = [self.rn(_tree(sums, g, i, 0, leaves)) for g in range(kv_heads)]
            clipped = [operands[g][3 * i + 2] for g in range(kv_heads)]
            grads.append(np.stack([np.where(c, F32(0), t) for c, t in zip(clipped, totals)], 1))
        return dq, *grads


U32, U16 = 2.0**-24, 2.0**-8  # largest relative error of one rounding
EXP = 2.0e-7  # of the exp polynomial
E4M3, E4M3_STEP = 2.0**-4, 2.0**-10  # of a rounding to E4M3: relative, and half a step of its subnormals


def float64_fp8_attention(contract: FP8Contract, q, k, v, d_out, heads: int, kv_heads: int):
    """One sequence in float64 over the same codes and scales, per name (value, first-order error bound).

    The gradient is straight through. Bounds as in test_attention.py, with two more FP32 roundings in s, one in p before
    its own, one in dp, one in ds; with FP8 operands P is off by a rounding to E4M3 of its block's scale.
    """
    group, count, dim = heads // kv_heads, len(q), q.shape[1] // heads
    scale = dim**-0.5
    parts = []
    for g in range(kv_heads):
        rows = [x.float().numpy()[:, g * dim : (g + 1) * dim] for x in (k, v)]
        kg, ks, kc, vg, vs, vc = contract.operands(*rows, g)
        parts.append((kg * ks[:, None].astype(np.float64), kc, vg * vs[:, None].astype(np.float64), vc, vs, ks))
    stacked = [torch.from_numpy(np.stack([p[i] for p in parts]).repeat(group, 0)).double() for i in range(6)]
    k, k_clipped, v, v_clipped, v_scale, _ = stacked
    q, g = (x.double().reshape(count, heads, dim).transpose(0, 1) for x in (q, d_out))
    seen_q = q
    if contract.math:
        made = [contract.quantise(x.float().numpy())[:2] for x in q]
        seen_q = torch.from_numpy(np.stack([grid * s[:, None].astype(np.float64) for grid, s in made]))
    hidden = torch.ones(count, count).triu(1).bool()
    s = (seen_q @ k.mT) * scale
    delta_s = ((dim + 4) * U32 * (seen_q.abs() @ k.abs().mT) * scale).masked_fill(hidden, 0).amax(-1, keepdim=True)
    s = s.masked_fill(hidden, -torch.inf)
    p = s.softmax(-1)
    out = p @ v
    blocks = count // 64 + 1
    wiggle = 2 * (2 * delta_s + EXP * (blocks + 1)) + (count + 3 * blocks + 6) * U32
    p_rounding = U16 * (p @ v.abs())
    if contract.math:
        p_rounding = E4M3 * (p @ v.abs())
        for begin in range(0, count, 64):  # subnormal codes: half a step of the block's scale per key
            keys = slice(begin, begin + 64)
            largest = (p[..., keys] * v_scale[:, None, keys]).amax(-1, keepdim=True)
            step = E4M3_STEP * largest / 448 * (2 if contract.pow2 else 1)
            unscaled = v[:, keys].abs() / v_scale[:, keys, None]
            p_rounding = p_rounding + step * unscaled.sum(1, keepdim=True)
    out_bound = (p @ v.abs()) * wiggle + p_rounding + out.abs() * (wiggle + U16)
    size = s.masked_fill(hidden, 0).abs().amax(-1, keepdim=True) + np.log(count) + 1
    p_error = 2 * delta_s + wiggle + EXP + 3 * size * U32
    delta = (g * out).sum(-1, keepdim=True)
    delta_error = (g.abs() * out_bound).sum(-1, keepdim=True) + (dim + 1) * U32 * (g * out).abs().sum(-1, True)
    dp = g @ v.mT
    dp_error = (dim + 2) * U32 * (g.abs() @ v.abs().mT)
    ds = p * (dp - delta) * scale
    ds_error = p * scale * ((dp - delta).abs() * (p_error + 4 * U32) + dp_error + delta_error) + ds.abs() * U16
    chain = (count * group + 4) * U32
    results = {"out": (out, out_bound)}
    results["dq"] = (ds @ k, ds_error @ k.abs() + chain * (ds.abs() @ k.abs()))
    results["dk"] = (ds.mT @ q, ds_error.mT @ q.abs() + chain * (ds.abs().mT @ q.abs()))
    results["dv"] = (p.mT @ g, (p * (p_error + U16)).mT @ g.abs() + chain * (p.mT @ g.abs()))
    for name, clipped in (("dk", k_clipped), ("dv", v_clipped)):
        summed = [x.reshape(kv_heads, group, count, dim).sum(1) for x in results[name]]
        results[name] = tuple(x * (1 - clipped[::group]) for x in summed)
    for name, (value, bound) in results.items():
        results[name] = tuple(x.transpose(0, 1).reshape(count, -1) for x in (value, bound + value.abs() * U16))
    return results
