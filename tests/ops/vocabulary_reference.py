"""The head's contract in plain numpy and Python integers: every rounding by hand, kept sets by a full sort.

It is the definition that the kernels are held against, bit by bit. `fma` is emulated in extended precision (64-bit
mantissa: a product of two FP32 numbers is exact in it), on the portable build by two roundings.
"""

import math

import numpy as np

from zerogap.ops.cpu import library

F = np.float32
GOLDEN, ALL_64 = 0x9E3779B97F4A7C15, 2**64 - 1


def fma(a, b, c):
    if library.backend().endswith("portable"):
        return F(F(a) * F(b)) + F(c)
    return F(np.longdouble(a) * np.longdouble(b) + np.longdouble(c))


def exp(x: np.ndarray) -> np.ndarray:
    """The library's exp (kernels/simd.h) for FP32 x <= 0."""
    dead = x < F(-87.33654)
    y = np.where(dead, F(-87.33654), x).astype(F)
    n = np.rint(y * F(1.44269504))
    r = fma(n, F(-0.693359375), y)
    r = fma(n, F(2.12194440e-4), r)
    p = np.full_like(y, F(1.9875691500e-4))
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = fma(p, r, F(c))
    square = r * r
    square = np.where(square < F(2.0**-126), F(0), square)  # flush to zero
    p = fma(square, p, r + F(1))
    return np.where(dead, F(0), np.ldexp(p, n.astype(np.int32))).astype(F)


def log(x: np.float32) -> np.float32:
    """The library's log of one FP32 number >= 1."""
    mantissa, exponent = math.frexp(float(x))
    if mantissa < 0.707106781186547524:
        exponent, m = exponent - 1, F(F(mantissa) + F(mantissa)) - F(1)
    else:
        m = F(mantissa) - F(1)
    z, p = m * m, F(7.0376836292e-2)
    for c in (-1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1):
        p = fma(p, m, F(c))
    for c in (2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1):
        p = fma(p, m, F(c))
    y = p * m * z
    y = fma(F(exponent), F(-2.12194440e-4), y)
    y = fma(F(-0.5), z, y)
    return fma(F(exponent), F(0.693359375), m + y)


def lane_sum(lanes: np.ndarray) -> np.float32:
    lanes = lanes.copy()
    half = 8
    while half:
        lanes[:half] = lanes[:half] + lanes[half : 2 * half]
        half //= 2
    return lanes[0]


def tree(values: list) -> np.float32:
    while len(values) > 1:
        pairs = [values[i] + values[i + 1] for i in range(0, len(values) - 1, 2)]
        values = pairs + values[len(pairs) * 2 :]
    return values[0]


def leaf_sums(e: np.ndarray, d: np.ndarray, leaf_size: int) -> tuple[np.float32, np.float32]:
    """(sum of e, sum of e * d): sixteen lanes per leaf, then the tree over leaves."""
    sums, weighted = [], []
    for begin in range(0, len(e), leaf_size):
        part, distance = e[begin : begin + leaf_size], d[begin : begin + leaf_size]
        pad = -len(part) % 16
        part, distance = (np.pad(a, (0, pad)).reshape(-1, 16) for a in (part, distance))
        s, w = np.zeros(16, F), np.zeros(16, F)
        for row, gap in zip(part, distance, strict=True):
            s = s + row
            w = fma(row, gap, w)
        sums.append(lane_sum(s))
        weighted.append(lane_sum(w))
    return tree(sums), tree(weighted)


def mix(word: int, index: int) -> int:
    x = word ^ ((index + 1) * GOLDEN & ALL_64)
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & ALL_64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & ALL_64
    return x ^ (x >> 31)


def digest(ids) -> int:
    words: dict[int, int] = {}
    for i in ids:
        words[int(i) // 64] = words.get(int(i) // 64, 0) | 1 << (int(i) % 64)
    return sum(mix(word, index) for index, word in words.items()) & ALL_64


def philox(counter: tuple, key: tuple) -> tuple:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & 0xFFFFFFFF, (a >> 32) ^ c3 ^ k1, a & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def ceil_share(p: np.float32, total: int) -> int:
    numerator, denominator = float(p).as_integer_ratio()
    return -(-numerator * total // denominator)


class Row:
    """One row of the contract: kept ids, log-probs of all ids, entropy, and the id of a 64-bit draw."""

    def __init__(self, logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, leaf_size=64, kept=None) -> None:
        z = np.asarray(logits, F)
        self.greedy = temperature == 0
        self.y = (z / F(1.0 if self.greedy else temperature) + F(0)).astype(F)
        maximum = self.y.max() if kept is None else self.y[kept].max()
        with np.errstate(over="ignore"):
            d = self.y - maximum
            e = np.where(d > 0, F(0), exp(np.minimum(d, F(0))))
        masses = [int(m) for m in np.rint(e.astype(np.float64) * 2.0**40)]
        if kept is None:
            kept = list(range(len(z)))
            if not self.greedy:
                kept = self.filter(kept, masses, top_k, F(top_p), F(min_p))
        self.kept = sorted(int(i) for i in kept)
        inside = np.zeros(len(z), bool)
        inside[self.kept] = True
        e = np.where(inside, e, F(0))
        self.masses = [m if i else 0 for m, i in zip(masses, inside, strict=True)]
        total, weighted = leaf_sums(e, d, leaf_size)
        self.logp = np.where(inside, d - log(total), F(-np.inf)).astype(F)
        self.entropy = log(total) - weighted / total
        self.e, self.total = e, total

    def filter(self, kept, masses, top_k, top_p, min_p) -> list[int]:
        kept = sorted(kept, key=lambda i: (-self.y[i], i))
        if top_k > 0:
            kept = kept[:top_k]
        if top_p < 1:
            need, running = ceil_share(top_p, sum(masses[i] for i in kept)), 0
            for count, i in enumerate(kept, 1):
                running += masses[i]
                if running >= need:
                    kept = kept[:count]
                    break
        if min_p > 0:
            kept = [i for i in kept if masses[i] >= ceil_share(min_p, 2**40)]
        return kept

    def draw(self, u: int) -> int:
        if self.greedy:
            return int(np.argmax(self.y))
        r, running = u * sum(self.masses) >> 64, 0
        for i, mass in enumerate(self.masses):
            running += mass
            if running > r:
                return i
        raise AssertionError("the draw lies beyond the total mass")
