"""Equality of bits, and data on which rounding shows.

`assert_same_bits` is the one equality of this project: integer views, so -0.0 differs from +0.0 and a NaN equals only a
NaN with the same payload. It fails with the first differing coordinate, both values and both bit patterns.
`hard_values` makes inputs with wide exponents whose sums cancel, so that two orders of summation really disagree:
a test of order that passes on mild data says nothing.
"""

from collections.abc import Sequence

import numpy as np
import torch

_INTEGER_OF_WIDTH = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

Array = torch.Tensor | np.ndarray


def bit_view(array: Array) -> np.ndarray:
    """The raw bits of `array` as unsigned integers of the same width and shape (bool and integers included)."""
    if isinstance(array, torch.Tensor):
        array = array.detach().cpu().contiguous()
        width = array.element_size()
        signed = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
        return array.view(signed).numpy().view(_INTEGER_OF_WIDTH[width])
    array = np.ascontiguousarray(array)
    return array.view(_INTEGER_OF_WIDTH[array.dtype.itemsize])


def _float64(array: Array) -> np.ndarray:
    return (array.detach().cpu().to(torch.float64).numpy() if isinstance(array, torch.Tensor) else array).astype(
        np.float64
    )


def _dtype_name(array: Array) -> str:
    return str(array.dtype).removeprefix("torch.")


def count_differing_bits(actual: Array, expected: Array) -> int:
    """How many elements differ in at least one bit. Shapes and dtypes must agree."""
    _require_same_form(actual, expected, "count_differing_bits")
    return int((bit_view(actual) != bit_view(expected)).sum())


def _require_same_form(actual: Array, expected: Array, what: str) -> None:
    assert tuple(actual.shape) == tuple(expected.shape), (
        f"{what}: shape {tuple(actual.shape)} against {tuple(expected.shape)}"
    )
    assert _dtype_name(actual) == _dtype_name(expected), (
        f"{what}: dtype {_dtype_name(actual)} against {_dtype_name(expected)}"
    )


def assert_same_bits(actual: Array, expected: Array, what: str = "values") -> None:
    """Fail unless both arrays have the same shape, dtype and bits.

    Args:
        actual, expected: torch tensors or numpy arrays of any numeric dtype.
        what: named first in the message.
    """
    _require_same_form(actual, expected, what)
    actual_bits, expected_bits = bit_view(actual), bit_view(expected)
    differs = actual_bits != expected_bits
    count = int(differs.sum())
    if not count:
        return
    first = tuple(int(i) for i in np.argwhere(differs)[0])
    hex_digits = actual_bits.dtype.itemsize * 2
    actual_values, expected_values = _float64(actual), _float64(expected)
    gap = np.abs(actual_values - expected_values)[differs]
    finite = gap[np.isfinite(gap)]
    largest = f"{finite.max():.6g}" if finite.size else "not finite"
    raise AssertionError(
        f"{what}: {count} of {actual_bits.size} elements differ in bits, largest finite difference {largest}\n"
        f"  first at {first}: {actual_values[first]!r} (0x{actual_bits[first]:0{hex_digits}x})"
        f" against {expected_values[first]!r} (0x{expected_bits[first]:0{hex_digits}x})"
    )


def assert_different_bits(actual: Array, expected: Array, what: str = "values") -> None:
    """The control of an order test: fail if nothing differs, for then the data could not have shown a difference."""
    assert count_differing_bits(actual, expected) > 0, f"{what}: equal bits, so this control shows nothing"


def hard_values(
    shape: int | Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0, spread: int = 12
) -> torch.Tensor:
    """Random values with wide exponents whose sums along the last axis cancel.

    Magnitudes are `2^e * (1 + u)` with e uniform in [-spread, spread]. Along the last axis a random half of the values
    is followed, at a random place, by a near copy with the opposite sign, so that partial sums are far larger than the
    whole and the order of summation shows in the low bits.

    Args:
        shape: of the result.
        dtype: the float64 draws are rounded to it once.
        seed: of a generator of its own; the global torch state is neither read nor changed.
        spread: largest binary exponent; 12 keeps sums of products of two such arrays well inside FP32.
    """
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    generator = np.random.default_rng(seed)
    exponents = generator.integers(-spread, spread + 1, size=shape).astype(np.float64)
    values = np.exp2(exponents) * (1.0 + generator.random(shape)) * generator.choice([-1.0, 1.0], size=shape)
    if shape and shape[-1] >= 2:
        half = shape[-1] // 2
        order = np.argsort(generator.random(shape), axis=-1)
        near = np.take_along_axis(values, order[..., :half], axis=-1) * -(
            1.0 + generator.random((*shape[:-1], half)) / 64
        )
        np.put_along_axis(values, order[..., half : 2 * half], near, axis=-1)
    return torch.from_numpy(np.ascontiguousarray(values)).to(dtype)


def unit_values(shape: int | Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Standard normal values from a generator of their own, rounded once to `dtype`: for accuracy bounds."""
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).to(dtype)
