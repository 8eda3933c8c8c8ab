"""The matrix-product contract written out literally in numpy FP32, slow and obvious: what the kernels must equal.

Order of one accumulator: BF16 pairs along the reduced axis, the odd element's product first, both exact in FP32 and
added with one rounding each; an odd tail pairs with a zero. FP32: one fma per element (on the portable build: multiply,
then add), ascending. Leaves by the fixed tree. No value here is ever subnormal, so flushing does not show.
"""

import itertools

import numpy as np
import torch

from zerogap.ops.cpu import library

F32 = np.float32


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Correctly rounded FP32 a * b + c: the FP64 sum is rounded to odd first, so the second rounding is right."""
    product, addend = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    even = (total.view(np.int64) & 1) == 0
    nudged = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where(even & (error != 0), nudged, total).astype(F32)


def multiply_add(acc: np.ndarray, x: np.ndarray, y: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """acc [M, N] += sum over k of x [M, K] y [N, K], ascending, by the backend's primitive."""
    terms = x.shape[1]
    if dtype == torch.bfloat16:
        for k in range(0, terms, 2):
            if k + 1 < terms:
                acc = acc + x[:, None, k + 1] * y[None, :, k + 1]
            acc = acc + x[:, None, k] * y[None, :, k]
        return acc
    for k in range(terms):
        a, b = np.broadcast_arrays(x[:, None, k], y[None, :, k])
        acc = acc + a * b if library.backend() == "cpu/portable" else fma(a, b, acc)
    return acc


def tree(parts: list[np.ndarray]) -> np.ndarray:
    """Adjacent pairs, an odd last one passes up."""
    while len(parts) > 1:
        pairs = [parts[i] + parts[i + 1] for i in range(0, len(parts) - 1, 2)]
        parts = pairs + parts[len(parts) - len(parts) % 2 :]
    return parts[0]


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.to(torch.float32).numpy()


def product(segments: list[tuple[torch.Tensor, torch.Tensor, int]], mode: str) -> torch.Tensor:
    """FP32 [M, N], unrounded. Segments are (x [M, K], weight [N, K], leaf_size); `concatenate` takes one."""
    dtype = segments[0][0].dtype
    sizes = [leaf or x.shape[1] for x, _, leaf in segments]
    cut = [range(0, x.shape[1], size) for (x, _, _), size in zip(segments, sizes, strict=True)]
    zero = np.zeros((segments[0][0].shape[0], segments[0][1].shape[0]), F32)

    def run(acc: np.ndarray, s: int, leaf: int) -> np.ndarray:
        x, w, _ = segments[s]
        part = slice(cut[s][leaf], cut[s][leaf] + sizes[s])
        return multiply_add(acc, _numpy(x)[:, part], _numpy(w)[:, part], dtype)

    if mode == "chain":
        leaves = []
        for leaf in range(len(cut[0])):
            acc = zero
            for s in range(len(segments)):
                acc = run(acc, s, leaf)
            leaves.append(acc)
        return torch.from_numpy(tree(leaves))
    total = None
    for s in range(len(segments)):
        done = tree([run(zero, s, leaf) for leaf in range(len(cut[s]))])
        total = done if total is None else total + done
    return torch.from_numpy(total)


def blocks(pack_starts: list[int]) -> list[slice]:
    """Blocks of 128 rows of each pack, ascending."""
    return [
        slice(row, min(row + 128, end))
        for start, end in itertools.pairwise(pack_starts)
        for row in range(start, end, 128)
    ]


def weight_grad(dy: torch.Tensor, x: torch.Tensor, pack_starts: list[int], acc: torch.Tensor) -> torch.Tensor:
    """acc [N, K] plus the gradient of each block, one after the other."""
    total = acc.numpy().copy()
    for rows in blocks(pack_starts):
        left, right = np.ascontiguousarray(_numpy(dy)[rows].T), np.ascontiguousarray(_numpy(x)[rows].T)
        total = total + multiply_add(np.zeros_like(total), left, right, dy.dtype)
    return torch.from_numpy(total)


def column_grad(dy: torch.Tensor, pack_starts: list[int], acc: torch.Tensor) -> torch.Tensor:
    """acc [N] plus the plain sum of each block's rows, ascending from +0."""
    total = acc.numpy().copy()
    for rows in blocks(pack_starts):
        part = np.zeros_like(total)
        for row in _numpy(dy)[rows]:
            part = part + row
        total = total + part
    return torch.from_numpy(total)
