"""The attention contract, literally, in numpy: every fma, every rounding, every order of docs/numerics.md.

Slow and plain on purpose; the kernels must match it bit for bit. FP32 throughout; `fused` says whether the instruction
set has fma (the portable class rounds product and sum). Results below 2^-126 are zero, as flush-to-zero makes them.
"""

import dataclasses

import numpy as np

F32 = np.float32
TILE = 64


def flush(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < F32(2.0**-126), np.copysign(F32(0), x), x).astype(F32)


def round_bf16(x: np.ndarray) -> np.ndarray:
    """Nearest BF16, ties to even, as FP32."""
    bits = flush(x).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(F32)


def exact_fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """fl32(a * b + c) with one rounding: the product is exact in float64, the sum is rounded to odd there first."""
    a, b, c = np.broadcast_arrays(*(np.asarray(x, np.float64) for x in (a, b, c)))
    product = a * b
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    bits = total.copy().view(np.int64)
    toward = np.where((error > 0) == (total > 0), 1, -1)
    bits = np.where((error != 0) & (bits & 1 == 0), bits + toward, bits)
    return flush(bits.view(np.float64).astype(F32))


@dataclasses.dataclass(frozen=True)
class Contract:
    """Which class computes (`fused`), in which storage (`bf16`), with the contract's sizes."""

    bf16: bool
    fused: bool
    block: int = 64
    kv_split: int = 1024
    odd_first: bool = True

    def rn(self, x: np.ndarray) -> np.ndarray:
        return round_bf16(x) if self.bf16 else x

    def fma(self, a, b, c) -> np.ndarray:
        return exact_fma(a, b, c) if self.fused else flush(flush(np.multiply(a, b, dtype=F32)) + np.asarray(c, F32))

    def chain(self, a: np.ndarray, b: np.ndarray, start: np.ndarray, live: np.ndarray | None = None) -> np.ndarray:
        """start + sum over the last axis of a * b, in the order of the primitive.

        Args:
            a, b: [..., K], broadcast against each other but for K.
            live: bool [..., K]; elements that take part. A pair takes part when its even element does.
        """
        steps, total = a.shape[-1], start
        live = np.ones((steps,), bool) if live is None else live
        live = np.broadcast_to(live, (*np.broadcast_shapes(live.shape[:-1], start.shape), steps))
        width = 2 if self.bf16 else 1
        for k in range(0, steps, width):
            order = [k] if width == 1 else [k + 1, k] if self.odd_first else [k, k + 1]
            for i in order:
                if i < steps:
                    x, y = (np.where(live[..., i], v[..., i], F32(0)) for v in (a, b))
                else:
                    x = y = np.zeros((), F32)
                total = np.where(live[..., k], self.fma(x, y, total), total)
        return total

    def exp(self, x: np.ndarray) -> np.ndarray:
        x = np.asarray(x, F32)
        lowest = F32(-87.33654)
        dead = x < lowest
        x = np.where(dead, lowest, x)
        n = np.round(x * F32(1.44269504)).astype(F32)
        r = self.fma(n, F32(-0.693359375), x)
        r = self.fma(n, F32(2.12194440e-4), r)
        p = np.full_like(r, F32(1.9875691500e-4))
        for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            p = self.fma(p, r, F32(c))
        p = self.fma(r * r, p, r + F32(1))
        return np.where(dead, F32(0), np.ldexp(p, n.astype(np.int32))).astype(F32)

    def log(self, x: np.ndarray) -> np.ndarray:
        m, e = np.frexp(np.asarray(x, F32))
        low = m < F32(0.707106781186547524)
        e = np.where(low, e - 1, e).astype(F32)
        m = np.where(low, m + m - F32(1), m - F32(1)).astype(F32)
        z = m * m
        p = np.full_like(m, F32(7.0376836292e-2))
        for c in (
            *(-1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1),
            *(2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1),
        ):
            p = self.fma(p, m, F32(c))
        y = p * m * z
        y = self.fma(e, F32(-2.12194440e-4), y)
        y = self.fma(F32(-0.5), z, y)
        return self.fma(e, F32(0.693359375), m + y)

    def lane_sum(self, x: np.ndarray) -> np.ndarray:
        """Sixteen lanes, lane = index mod 16 and ascending in it, then the halving tree; over the last axis."""
        lanes = x[..., :16]
        for i in range(16, x.shape[-1], 16):
            lanes = lanes + x[..., i : i + 16]
        for half in (8, 4, 2, 1):
            lanes = lanes[..., :half] + lanes[..., half : 2 * half]
        return lanes[..., 0]

    def scores(self, q: np.ndarray, k: np.ndarray, scale: float) -> np.ndarray:
        """fl(dot * scale) [T, T]."""
        dots = self.chain(q[:, None, :], k[None, :, :], np.zeros((len(q), len(k)), F32))
        return flush(dots * F32(scale))

    def head_forward(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
        """One head of one sequence, rows at positions 0 .. T-1. q, k, v [T, D] -> out [T, D], lse [T]."""
        count, dim = q.shape
        padded = -(-count // self.block) * self.block
        s = np.full((count, padded), -np.inf, F32)
        s[:, :count] = self.scores(q, k, scale)
        visible = np.arange(padded)[None, :] <= np.arange(count)[:, None]
        s[~visible] = -np.inf
        v = np.concatenate([v, np.zeros((padded - count, dim), F32)])
        state = merged = (np.zeros(count, F32), np.zeros(count, F32), np.zeros((count, dim), F32))
        for begin in range(0, padded, self.block):
            rows = np.arange(count) >= begin  # rows that see this block
            keys = slice(begin, begin + self.block)
            first = begin % self.kv_split == 0
            if first and begin:
                merged = self._select(rows, self._merge(merged, state, begin == self.kv_split), merged)
            state = self._select(rows, self._block(state, s[:, keys], v[keys], visible[:, keys], first), state)
        split = np.arange(count) >= self.kv_split
        m, l, o = self._select(split, self._merge(merged, state, False), state)
        return self.rn(flush(o / l[:, None])), m + self.log(l)

    @staticmethod
    def _select(rows: np.ndarray, yes: tuple, no: tuple) -> tuple:
        return tuple(np.where(rows[:, None] if y.ndim == 2 else rows, y, n) for y, n in zip(yes, no, strict=True))

    def _block(self, state: tuple, s: np.ndarray, v: np.ndarray, visible: np.ndarray, first: bool) -> tuple:
        m, l, o = state
        top = s.max(-1)
        new_m = np.where(np.isfinite(top), top if first else np.maximum(m, top), F32(0))
        p = np.where(visible, self.exp(np.where(visible, s - new_m[:, None], F32(0))), F32(0))
        product = self.chain(self.rn(p)[:, None, :], v.T[None], np.zeros_like(o), visible[:, None, :])
        if first:
            return new_m, self.lane_sum(p), product
        alpha = self.exp(np.minimum(m - new_m, F32(0)))
        return new_m, self.fma(l, alpha, self.lane_sum(p)), self.fma(o, alpha[:, None], product)

    def _merge(self, left: tuple, right: tuple, copy: bool) -> tuple:
        if copy:
            return right
        (m1, l1, o1), (m2, l2, o2) = left, right
        m = np.maximum(m1, m2)
        a1, a2 = self.exp(m1 - m), self.exp(m2 - m)
        return m, self.fma(l1, a1, flush(l2 * a2)), self.fma(o1, a1[:, None], flush(o2 * a2[:, None]))

    def forward(self, q, k, v, heads: int, kv_heads: int, scale: float) -> tuple[np.ndarray, np.ndarray]:
        """One sequence: q [T, Hq, D], k and v [T, Hk, D] -> out like q, lse [T, Hq]."""
        group = heads // kv_heads
        parts = [self.head_forward(q[:, h], k[:, h // group], v[:, h // group], scale) for h in range(heads)]
        return np.stack([p[0] for p in parts], 1), np.stack([p[1] for p in parts], 1)

    def backward(self, q, k, v, out, lse, d_out, leaves: int, scale: float) -> tuple[np.ndarray, ...]:
        """One sample: gradients of q [T, Hq, D] and of k, v [T, Hk, D]."""
        count, heads, dim = q.shape
        group, per_leaf = heads // k.shape[1], heads // leaves
        dq = np.zeros_like(q)
        sums = {}  # (KV head, leaf) -> chains of dk and dv
        tile_of = np.arange(count) // TILE
        below = tile_of[None, :] <= tile_of[:, None]  # [query, key] in a tile pair that is computed
        for h in range(heads):
            g = h // group
            p, ds = self._grad_scores(q[:, h], k[:, g], v[:, g], out[:, h], lse[:, h], d_out[:, h], scale)
            dq[:, h] = self.rn(
                self.chain(ds[:, None, :], k[:, g].T[None], np.zeros((count, dim), F32), below[:, None, :])
            )
            zeros = np.zeros((count, dim), F32)
            dk, dv = sums.get((g, h // per_leaf), (zeros, zeros))
            live = below.T[:, None, :]
            sums[g, h // per_leaf] = (
                self.chain(ds.T[:, None, :], q[:, h].T[None], dk, live),
                self.chain(p.T[:, None, :], d_out[:, h].T[None], dv, live),
            )
        kv_heads = range(k.shape[1])
        dk, dv = (np.stack([self.rn(_tree(sums, g, i, 0, leaves)) for g in kv_heads], 1) for i in (0, 1))
        return dq, dk, dv

    def _grad_scores(self, q, k, v, out, lse, d_out, scale: float) -> tuple[np.ndarray, np.ndarray]:
        """rn(p) and rn(ds), [T, T], +0 where masked."""
        count = len(q)
        causal = np.tril(np.ones((count, count), bool))
        delta = np.zeros((count, 16), F32)
        for i in range(0, q.shape[1], 16):
            delta = self.fma(out[:, i : i + 16], d_out[:, i : i + 16], delta)
        delta = self.lane_sum(delta)
        s = self.scores(q, k, scale)
        p = np.where(causal, self.exp(np.where(causal, s - lse[:, None], F32(0))), F32(0))
        dp = self.chain(d_out[:, None, :], v[None], np.zeros((count, count), F32))
        ds = np.where(causal, flush(flush(p * (dp - delta[:, None])) * F32(scale)), F32(0))
        return self.rn(p), self.rn(ds)


def _tree(sums: dict, kv_head: int, which: int, low: int, high: int) -> np.ndarray | None:
    """The fixed tree over leaves [low, high); absent leaves pass their partner up."""
    if high - low == 1:
        return sums[kv_head, low][which] if (kv_head, low) in sums else None
    middle = (low + high) // 2
    left, right = _tree(sums, kv_head, which, low, middle), _tree(sums, kv_head, which, middle, high)
    if left is None or right is None:
        return right if left is None else left
    return left + right
