"""The contract of norm, RoPE, SiLU, embedding and optimizer, written out literally in numpy FP32, slow and obvious.

Every operation is one rounding; `fma` is one on instruction sets that fuse and two on the portable build; results below
2^-126 are zero with their sign, as flush-to-zero makes them. Arrays are FP32 [rows, columns]; `rn` rounds to BF16.
"""

import itertools

import numpy as np
import torch

from zerogap.ops.cpu import library

F32 = np.float32
LANES = 16
BLOCK = 128


def array(tensor: torch.Tensor) -> np.ndarray:
    """FP32 values of a tensor; subnormals read as zero."""
    return flush(tensor.detach().to(torch.float32).numpy())


def flush(x: np.ndarray) -> np.ndarray:
    x = np.asarray(x, F32)
    return np.where(np.abs(x) < F32(2.0**-126), np.copysign(F32(0), x), x)


def rn(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Rounded to the storage dtype, as FP32."""
    return flush(torch.from_numpy(flush(x)).to(dtype).to(torch.float32).numpy())


def stored(x: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """Rounded to the storage dtype, as a tensor of it."""
    return torch.from_numpy(rn(x, dtype)).to(dtype)


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c by the loaded library's primitive. Fused: the FP64 sum is rounded to odd, so that FP32 is right."""
    a, b, c = np.broadcast_arrays(*(np.asarray(v, F32) for v in (a, b, c)))
    if library.backend() == "cpu/portable":
        return flush(flush(a * b) + c)
    product, addend = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    even = (total.view(np.int64) & 1) == 0
    nudged = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return flush(np.where(even & (error != 0) & np.isfinite(total), nudged, total).astype(F32))


def lane_sum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """[R]: sum of a * b over the columns; column i in lane i % 16, ascending, then the halving tree."""
    rows, width = a.shape
    lanes = np.zeros((rows, LANES), F32)
    for i in range(0, width, LANES):
        n = min(LANES, width - i)
        lanes[:, :n] = fma(a[:, i : i + n], b[:, i : i + n], lanes[:, :n])
    half = LANES // 2
    while half:
        lanes[:, :half] = flush(lanes[:, :half] + lanes[:, half : 2 * half])
        half //= 2
    return lanes[:, 0]


def blocks(pack_starts: list[int]) -> list[range]:
    """Blocks of 128 rows of each pack."""
    return [
        range(first, min(first + BLOCK, end))
        for start, end in itertools.pairwise(pack_starts)
        for first in range(start, end, BLOCK)
    ]


# ---------------------------------------------------------------------------------------------------- norm


def inverse_root(r: np.ndarray, eps: float) -> np.ndarray:
    """[R, 1]."""
    mean = lane_sum(r, r) / F32(r.shape[1])
    return (F32(1) / np.sqrt(mean + F32(eps)))[:, None]


def norm(r: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """Unrounded normed rows [R, D] of the rounded residual."""
    return flush(flush(r * inverse_root(r, eps)) * weight)


def norm_input_grad(r: np.ndarray, weight: np.ndarray, d_normed: np.ndarray, eps: float) -> np.ndarray:
    """Unrounded [R, D]."""
    inverse = inverse_root(r, eps)
    normal, g = flush(r * inverse), flush(d_normed * weight)
    slope = (lane_sum(g, normal) / F32(r.shape[1]))[:, None]
    return flush(fma(-normal, slope, g) * inverse)


def norm_weight_grad(
    r: np.ndarray, d_normed: np.ndarray, eps: float, heads: int, leaves: int, starts: list[int]
) -> np.ndarray:
    """[leaves, D] from +0; r and d_normed are [T * heads, D]."""
    normal = flush(r * inverse_root(r, eps))
    acc = np.zeros((leaves, r.shape[1]), F32)
    share = heads // leaves
    for leaf in range(leaves):
        for block in blocks(starts):
            chain = np.zeros(r.shape[1], F32)
            for t in block:
                for h in range(leaf * share, (leaf + 1) * share):
                    chain = fma(d_normed[t * heads + h], normal[t * heads + h], chain)
            acc[leaf] = acc[leaf] + chain
    return acc


# ---------------------------------------------------------------------------------------------------- rope, silu


def rotate(x: np.ndarray, table: np.ndarray, positions: np.ndarray, dim: int, sign: int = 1) -> np.ndarray:
    """Unrounded rotation of [T, heads * dim]; sign -1 turns back."""
    rows, half = x.shape[0], dim // 2
    heads = x.reshape(rows, -1, dim)
    c, s = table[positions, None, :half], F32(sign) * table[positions, None, half:]
    a, b = heads[..., :half], heads[..., half:]
    return np.concatenate([fma(a, c, -flush(b * s)), fma(b, c, flush(a * s))], -1).reshape(x.shape)


def exp(x: np.ndarray) -> np.ndarray:
    """The kernels' exp for x <= 0 (Cody-Waite reduction, degree-7 polynomial of the Cephes library)."""
    lowest = F32(-87.33654)
    dead = x < lowest
    y = np.where(dead, lowest, x)
    n = np.round(y * F32(1.44269504)).astype(F32)
    r = fma(n, F32(2.12194440e-4), fma(n, F32(-0.693359375), y))
    p = np.full_like(y, F32(1.9875691500e-4))
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = fma(p, r, F32(c))
    p = fma(r * r, p, r + F32(1))
    return np.where(dead, F32(0), flush(np.ldexp(p, n.astype(np.int32))))


def sigmoid(g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """sigmoid(g) and 1 - sigmoid(g)."""
    e = exp(-np.abs(g))
    total, positive = F32(1) + e, g >= 0
    return flush(np.where(positive, F32(1), e) / total), flush(np.where(positive, e, F32(1)) / total)


def silu_mul(g: np.ndarray, u: np.ndarray) -> np.ndarray:
    return flush(flush(g * sigmoid(g)[0]) * u)


def silu_mul_grad(g: np.ndarray, u: np.ndarray, d: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    sig, rest = sigmoid(g)
    d_gate = flush(flush(d * u) * flush(sig * fma(g, rest, F32(1))))
    return d_gate, flush(d * flush(g * sig))


# ---------------------------------------------------------------------------------------------------- embedding


def embedding_grad(dy: np.ndarray, ids: list[int], starts: list[int], vocab: int) -> np.ndarray:
    """[V, H] from +0."""
    acc = np.zeros((vocab, dy.shape[1]), F32)
    for block in blocks(starts):
        for token in sorted({ids[t] for t in block}):
            total = np.zeros(dy.shape[1], F32)
            for t in block:
                if ids[t] == token:
                    total = total + dy[t]
            acc[token] = acc[token] + total
    return acc


# ---------------------------------------------------------------------------------------------------- optimizer


def adamw(master, gradient, first, second, *, learning_rate, betas, eps, weight_decay, step, gradient_scale):
    """(master, first, second) after one update."""
    b1, b2 = betas
    g = flush(gradient * F32(gradient_scale))
    m = fma(F32(b1), first, flush(F32(1 - b1) * g))
    v = fma(F32(b2), second, flush(flush(F32(1 - b2) * g) * g))
    root = fma(np.sqrt(v), F32(1 / np.sqrt(1 - b2**step)), F32(eps))
    rate = F32(learning_rate / (1 - b1**step))
    return fma(-rate, flush(m / root), flush(master * F32(1 - learning_rate * weight_decay))), m, v
