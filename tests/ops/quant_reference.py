"""The block quantiser of docs/numerics.md once more, by its definition: float64, search in a table, no bit tricks.

Quotients of two FP32 numbers are formed in float64 and rounded to FP32: with 53 >= 2 * 24 + 2 bits this is the
correctly rounded quotient (Figueroa 1995). FP32's subnormal numbers count as zeros with their sign.
"""

import numpy as np
import torch

ALL_CODES = np.arange(256, dtype=np.uint8)
BLOCK = 128


def code_values() -> np.ndarray:
    """float64 [256]: the values of all codes by the definition of the format; NaN for 0x7f and 0xff."""
    exponent, mantissa = (ALL_CODES >> 3 & 15).astype(np.float64), (ALL_CODES & 7).astype(np.float64)
    value = np.where(exponent == 0, mantissa * 2.0**-9, np.exp2(exponent - 7) * (1 + mantissa / 8))
    value[(ALL_CODES & 0x7F) == 0x7F] = np.nan
    return np.copysign(value, np.where(ALL_CODES & 0x80, -1.0, 1.0))


def nearest_codes(y: np.ndarray) -> np.ndarray:
    """uint8 codes of float32 numbers: the nearest of the 127 magnitudes, a tie to the even code, sign kept.

    By comparison of exact float64 distances, so it shares no step with the kernel's rounding.
    """
    grid = code_values()[:127]
    magnitude = np.minimum(np.abs(y.astype(np.float64)), grid[-1])
    above = np.searchsorted(grid, magnitude)  # grid[above - 1] < magnitude <= grid[above]
    below = np.maximum(above - 1, 0)
    up, down = grid[above] - magnitude, magnitude - grid[below]
    code = np.where(up < down, above, np.where(down < up, below, np.where(above % 2 == 0, above, below)))
    return (code + np.where(np.signbit(y), 128, 0)).astype(np.uint8)


def flushed(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < 2.0**-126, np.copysign(0.0, x), x)


def scale_of(block: np.ndarray, scale_format: str) -> np.float32:
    """The scale of a block of float64 numbers."""
    amax = np.abs(block).max()
    if amax < 2.0**-100:
        return np.float32(1.0)
    scale = np.float32(amax / 448.0)
    if scale_format == "pow2":
        mantissa, exponent = np.frexp(np.float64(scale))  # in [1/2, 1)
        scale = np.float32(np.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent))
    return scale


def quantise(x: torch.Tensor, scale_format: str, block_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes uint8 [M, K], scales FP32) of BF16 x [M, K] in blocks of block_rows x 128 (1: rows, 128: a weight)."""
    values = x.to(torch.float64).numpy()
    rows, k = values.shape
    codes = np.zeros((rows, k), np.uint8)
    scales = np.zeros((-(-rows // block_rows), -(-k // BLOCK)), np.float32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            here = np.s_[i * block_rows : (i + 1) * block_rows, j * BLOCK : (j + 1) * BLOCK]
            scales[i, j] = scale_of(values[here], scale_format)
            quotient = flushed(flushed(values[here]) / np.float64(scales[i, j])).astype(np.float32)
            codes[here] = nearest_codes(quotient)
    return torch.from_numpy(codes), torch.from_numpy(scales)


def grid_values(codes: torch.Tensor) -> torch.Tensor:
    """BF16 grid values of codes."""
    return torch.from_numpy(code_values()[codes.numpy()]).to(torch.bfloat16)
