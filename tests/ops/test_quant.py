"""E4M3 codes and the block quantiser against an independent definition, bit for bit."""

import numpy as np
import pytest
import torch

from tests.bits import assert_same_bits
from zerogap.ops.cpu import quant

ALL_CODES = np.arange(256, dtype=np.uint8)


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


def grid_neighbours() -> np.ndarray:
    """float32: grid values, midpoints (exact ties) and the floats next to each; both signs, zeros, extremes."""
    grid = code_values()[:127].astype(np.float32)
    points = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2, [464.0, 480.0, 3.4e38, 2.0**-126, 2.0**-100]])
    points = points.astype(np.float32)
    near = [points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points[1:], np.float32(0))]
    positive = np.concatenate(near)
    return np.concatenate([positive, -positive])


def test_encode_rounds_to_nearest_even() -> None:
    generator = np.random.default_rng(0)
    wide = np.exp2(generator.uniform(-14, 10, 20000)) * generator.choice([-1.0, 1.0], 20000)
    y = np.concatenate([grid_neighbours(), wide.astype(np.float32)])
    y[(np.abs(y) < 2.0**-126) & (y != 0)] = 0.0  # subnormals count as zeros everywhere, in the reference as well
    codes, grid = quant.encode(torch.from_numpy(y))
    assert_same_bits(codes, nearest_codes(y), "codes")
    assert_same_bits(grid, torch.from_numpy(code_values()[codes.numpy()]).to(torch.bfloat16), "grid values")


def test_decode_knows_every_code() -> None:
    codes = torch.from_numpy(np.concatenate([ALL_CODES, ALL_CODES[::-1], ALL_CODES[:5]]))  # bulk and tail
    expected = torch.from_numpy(code_values()[codes.numpy()]).to(torch.bfloat16)
    number = ~expected.isnan()
    decoded = quant.decode(codes)
    assert_same_bits(decoded[number], expected[number], "grid values")
    assert decoded[~number].isnan().all()
    codes_again, _ = quant.encode(decoded.to(torch.float32))
    assert_same_bits(codes_again, codes, "codes of decoded codes")


def test_agrees_with_torch() -> None:
    """torch's float8_e4m3fn is the same format, and torch's conversion rounds the same way inside the range."""
    codes = torch.from_numpy(ALL_CODES.copy())
    number = (codes & 0x7F) != 0x7F
    theirs = codes.view(torch.float8_e4m3fn).to(torch.bfloat16)
    assert_same_bits(quant.decode(codes)[number], theirs[number], "grid values")
    y = torch.from_numpy(grid_neighbours())
    y = y[(y.abs() <= 448) & ((y.abs() >= 2.0**-126) | (y == 0))]
    assert_same_bits(quant.encode(y)[0], y.to(torch.float8_e4m3fn).view(torch.uint8), "codes")


@pytest.mark.parametrize("bad", [float("nan"), -float("nan")])
def test_nan_stays_nan(bad: float) -> None:
    codes, grid = quant.encode(torch.full((21,), bad))
    assert ((codes & 0x7F) == 0x7F).all() and grid.isnan().all()
