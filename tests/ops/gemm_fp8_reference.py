"""FP8 products written out literally in numpy: quantisation in blocks, panels byte by byte, scaled block sums.

Rounding to E4M3 is torch's own conversion, so that nothing here is shared with the kernels. Inside a scale block sums
run as in `gemm_reference`; a finished block enters by fma(block, fl32(s_left * s_right), acc) (on the portable build:
multiply, then add). No value here is ever subnormal.
"""

import numpy as np
import torch

from tests.ops.gemm_reference import F32, blocks, fma, multiply_add, tree
from zerogap.ops.cpu import library

BLOCK, PANEL = 128, 64


def wide(tensor: torch.Tensor) -> np.ndarray:
    return tensor.to(torch.float32).numpy()


def quantise(x: torch.Tensor, block: tuple[int, int], scale_format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 [A, B] and FP32 scales, one per block, of a BF16 [A, B]; blocks from (0, 0), ragged at the ends."""
    (a, b), (down, across) = x.shape, block
    padded = np.zeros((-(-a // down) * down, -(-b // across) * across), F32)
    padded[:a, :b] = wide(x)
    cut = padded.reshape(-(-a // down), down, -(-b // across), across)
    amax = np.abs(cut).max(axis=(1, 3))
    scales = np.where(amax < 2.0**-100, F32(1), amax / F32(448)).astype(F32)
    if scale_format == "pow2":
        mantissa, exponent = np.frexp(scales.astype(np.float64))
        scales = np.ldexp(1.0, exponent - (mantissa == 0.5)).astype(F32)
    ratio = (cut / scales[:, None, :, None]).reshape(padded.shape)[:a, :b].clip(-448, 448)
    codes = torch.from_numpy(np.ascontiguousarray(ratio)).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes, torch.from_numpy(scales)


def grid(codes: torch.Tensor) -> torch.Tensor:
    """BF16 values of codes."""
    return codes.contiguous().view(torch.float8_e4m3fn).to(torch.bfloat16)


def quantise_rows(x: torch.Tensor, scale_format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 values [M, K] as BF16 and scales [M, ceil(K / 128)]."""
    codes, scales = quantise(x, (1, BLOCK), scale_format)
    return grid(codes), scales


def panels(codes: torch.Tensor) -> torch.Tensor:
    """Codes [N, K] as the panels that kernels/product.h describes."""
    n, k = codes.shape
    out = np.zeros((-(-n // PANEL), -(-k // 2), 2 * PANEL), np.uint8)
    row, column = np.meshgrid(np.arange(n), np.arange(k), indexing="ij")
    v, c, i = row % PANEL // 16, row % 16, column % 2
    out[row // PANEL, column // 2, v // 2 * 64 + c // 4 * 16 + v % 2 * 8 + c % 4 * 2 + i] = codes.numpy()
    return torch.from_numpy(out)


def scaled_add(acc: np.ndarray, block: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """fma(block, scale, acc) by the backend class's own fma."""
    return acc + block * scale if library.backend() == "cpu/portable" else fma(block, scale, acc)


class Operands:
    """One segment: x [M, K] and weight [N, K], BF16 values or E4M3 values with scales [M, .] and [N / 128, .]."""

    def __init__(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        leaf_size: int = 0,
        x_scales: torch.Tensor | None = None,
        w_scales: torch.Tensor | None = None,
    ) -> None:
        self.x, self.w, self.size = wide(x), wide(w), leaf_size or x.shape[1]
        self.x_scales = None if x_scales is None else x_scales.numpy()
        self.w_scales = None if w_scales is None else np.repeat(w_scales.numpy(), BLOCK, axis=0)[: w.shape[0]]
        self.leaves = range(0, x.shape[1], self.size)

    def run(self, acc: np.ndarray, leaf: int) -> np.ndarray:
        """acc [M, N] after this segment's elements of one leaf."""
        first, last = self.leaves[leaf], min(self.leaves[leaf] + self.size, self.x.shape[1])
        if self.x_scales is None or self.w_scales is None:
            return multiply_add(acc, self.x[:, first:last], self.w[:, first:last], torch.bfloat16)
        for k in range(first, last, BLOCK):
            part, b = slice(k, min(k + BLOCK, last)), k // BLOCK
            block = multiply_add(np.zeros_like(acc), self.x[:, part], self.w[:, part], torch.bfloat16)
            acc = scaled_add(acc, block, self.x_scales[:, None, b] * self.w_scales[None, :, b])
        return acc


def product(segments: list[Operands], mode: str) -> torch.Tensor:
    """FP32 [M, N], unrounded; `concatenate` takes one segment."""
    zero = np.zeros((segments[0].x.shape[0], segments[0].w.shape[0]), F32)
    if mode == "chain":
        leaves = []
        for leaf in range(len(segments[0].leaves)):
            acc = zero
            for segment in segments:
                acc = segment.run(acc, leaf)
            leaves.append(acc)
        return torch.from_numpy(tree(leaves))
    total = None
    for segment in segments:
        done = tree([segment.run(zero, leaf) for leaf in range(len(segment.leaves))])
        total = done if total is None else total + done
    return torch.from_numpy(total)


def weight_grad(
    dy: torch.Tensor, x: torch.Tensor, pack_starts: list[int], acc: torch.Tensor, scale_format: str
) -> torch.Tensor:
    """acc [N, K] plus the scaled gradient of each block of rows, one after the other."""
    total = acc.numpy().copy()
    for rows in blocks(pack_starts):
        (left, left_scale), (right, right_scale) = (
            quantise(t[rows], (BLOCK, 1), scale_format) for t in (dy.contiguous(), x.contiguous())
        )
        block = multiply_add(
            np.zeros_like(total),
            np.ascontiguousarray(wide(grid(left)).T),
            np.ascontiguousarray(wide(grid(right)).T),
            torch.bfloat16,
        )
        scale = left_scale.numpy()[0][:, None] * right_scale.numpy()[0][None, :]
        total = scaled_add(total, block, scale)
    return torch.from_numpy(total)
