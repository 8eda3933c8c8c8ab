"""Single steps of other machines' arithmetic on FP32 tensors: one rounding each, to put whole forms together.

Everything takes and gives FP32 (what a narrower type can hold is exact in it) and is elementwise or runs along the last
axis. Formats: BF16 and FP16 as torch rounds them; TF32 is 10 bits of fraction; `truncated` drops bits instead of
rounding; E4M3 saturates at 448, or at 240 where a stack uses that format's other variant.
"""

import functools
from collections.abc import Sequence

import torch

FP32 = torch.float32
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_BELOW, _HALF = (1 << 29) - 1, 1 << 28  # bits of an FP64 fraction that FP32 has not, and half of its last place
_NORMAL = 2.0**-126


def _drop(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x.contiguous().view(torch.int32) & ~((1 << bits) - 1)).view(FP32)


def _nearest(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Round to nearest even at `bits` dropped bits of the fraction."""
    raw = x.contiguous().view(torch.int32)
    half = (1 << (bits - 1)) - 1
    return ((raw + half + ((raw >> bits) & 1)) & ~((1 << bits) - 1)).view(FP32)


def round_to(x: torch.Tensor, name: str) -> torch.Tensor:
    """x rounded to a format, as FP32: `fp32`, `fp64` (both as it is), `bf16`, `fp16`, `tf32`, `bf16 truncated`,
    `tf32 truncated`, `fp16 truncated`."""
    if name in ("fp32", "fp64", "stored", "none"):
        return x.to(FP32)
    x = x.to(FP32)
    if name == "bf16 truncated":
        return _drop(x, 16)
    if name == "tf32":
        return _nearest(x, 13)
    if name == "tf32 truncated":
        return _drop(x, 13)
    return x.to(DTYPES[name]).to(FP32)


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Correctly rounded FP32 a * b + c: the product is exact in FP64; where rounding its FP64 sum again could go wrong
    (halfway between two FP32 numbers, or below their normal range), the sum is rounded to odd first."""
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    found = total.to(FP32)
    risky = (total.view(torch.int64) & _BELOW) == _HALF
    risky |= (found.abs() < _NORMAL) & (total != 0)
    return _odd(product, addend, total) if bool(risky.any()) else found


def _odd(product: torch.Tensor, addend: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """The sum in FP32 by way of the FP64 sum rounded to odd."""
    back = total - product
    error = (product - (total - back)) + (addend - back)
    raw = total.view(torch.int64)
    toward = torch.where((error > 0) == (total > 0), 1, -1)
    odd = torch.where((error != 0) & ((raw & 1) == 0), raw + toward, raw)
    return torch.where(total.isfinite(), odd.view(torch.float64), total).to(FP32)


def multiply_add(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, fused: bool) -> torch.Tensor:
    """a * b + c with one rounding, or with two."""
    return fma(a, b, c) if fused else a * b + c


@functools.cache
def constant(value: float) -> torch.Tensor:
    """The nearest FP32, as a tensor of no dimensions."""
    return torch.tensor(value, dtype=FP32)


def exp(x: torch.Tensor) -> torch.Tensor:
    """The contract's exp for x <= 0 (Cody-Waite reduction, degree-7 polynomial of the Cephes library)."""
    lowest = -87.33654
    dead = x < lowest
    x = torch.where(dead, lowest, x)

    n = (x * constant(1.44269504)).round()
    r = fma(n, constant(-0.693359375), x)
    r = fma(n, constant(2.12194440e-4), r)
    p = constant(1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = fma(p, r, constant(c))
    p = fma(r * r, p, r + 1)
    return torch.where(dead, 0.0, torch.ldexp(p, n.to(torch.int32)))


def fast_exp(x: torch.Tensor) -> torch.Tensor:
    """torch's vectorised exp within 20 ulp (ATen vec512, `exp_u20`): degree 5, results below the normal range are 0."""
    lowest, highest = constant(-87.33654022216797), constant(88.72283935546875)
    clamped = torch.maximum(torch.minimum(x, highest), lowest)
    n = fma(clamped, constant(1.4426950216293335), constant(0.5)).floor()
    r = fma(-n, constant(0.6931471824645996), clamped)
    p = fma(r, constant(0.00828929059), constant(0.0418978221))
    for c in (0.166676521, 0.499991506, 0.999999701, 1.0):
        p = fma(r, p, constant(c))
    return torch.where(x < lowest, 0.0, torch.ldexp(p, n.to(torch.int32)))


def faster_exp(x: torch.Tensor) -> torch.Tensor:
    """torch's vectorised exp where a narrow result is stored (ATen vec512, `fexp_u20`; Malossi et al., "Fast
    Exponential Computation on SIMD Architectures"): a cubic corrects the fraction, the sum's bits are the result."""
    scaled = x.clamp(-87.33654022216797, 88.72283935546875) * constant(1.4426950216293335)
    fraction = scaled - scaled.floor()
    p = fma(fraction, constant(-0.079204240219773236), constant(-0.22433836478672356))
    p = fma(fraction, p, constant(0.30354260500649682))
    p = fma(fraction, p, constant(0.00010703434948458272))
    bits = fma(constant(2.0**23), scaled - p, constant(127 * 2.0**23)).to(torch.int32)
    return torch.where(x < -87.33654022216797, 0.0, bits.view(FP32))


# ---------------------------------------------------------------------------------------------------- sums


def tree(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Adjacent pairs, an odd last one passes up."""
    found = list(parts)
    while len(found) > 1:
        pairs = [found[i] + found[i + 1] for i in range(0, len(found) - 1, 2)]
        found = pairs + found[len(found) - len(found) % 2 :]
    return found[0]


def halving(lanes: torch.Tensor) -> torch.Tensor:
    """Lanes [..., 2^n] -> [...]: the upper half is added to the lower until one is left."""
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


def chain(terms: torch.Tensor) -> torch.Tensor:
    """Ascending sum over the last axis from +0."""
    total = torch.zeros_like(terms[..., 0])
    for i in range(terms.shape[-1]):
        total = total + terms[..., i]
    return total


def _padded(terms: torch.Tensor, width: int) -> torch.Tensor:
    short = -terms.shape[-1] % width
    return torch.nn.functional.pad(terms, (0, short)) if short else terms


def lanes(a: torch.Tensor, b: torch.Tensor, width: int, fused: bool) -> torch.Tensor:
    """Partial sums [..., width] of a * b over the last axis, element i in lane i mod width, ascending in each."""
    a, b = _padded(a, width), _padded(b, width)
    total = torch.zeros_like(a[..., :width])
    for i in range(0, a.shape[-1], width):
        total = multiply_add(a[..., i : i + width], b[..., i : i + width], total, fused)
    return total


def pairwise(terms: torch.Tensor) -> torch.Tensor:
    """A tree over single terms, padded with zeros to a power of two: neighbours first."""
    terms = _padded(terms, 1 << max(terms.shape[-1] - 1, 0).bit_length())
    while terms.shape[-1] > 1:
        terms = terms[..., 0::2] + terms[..., 1::2]
    return terms[..., 0]


def cascade(terms: torch.Tensor, vector: int) -> torch.Tensor:
    """torch's CPU sum over a contiguous axis (ATen SumKernel.cpp): vectors of `vector` lanes, four accumulators side by
    side, each a cascade of four levels; then lanes ascending, the ragged tail first."""
    size = terms.shape[-1] // vector
    rows = terms[..., : size * vector].unflatten(-1, (size, vector)) if size else terms[..., None, :0]
    count = size // 4
    step = 1 << max(4, max(count - 1, 0).bit_length() // 4)
    groups = rows[..., : count * 4, :].unflatten(-2, (count, 4)) if count else None
    level = [torch.zeros((*terms.shape[:-1], 4, vector)) for _ in range(4)]
    done = 0
    while groups is not None and done + step <= count:
        for _ in range(step):
            level[0] = level[0] + groups[..., done, :, :]
            done += 1
        for j in range(1, 4):
            level[j], level[j - 1] = level[j] + level[j - 1], torch.zeros_like(level[0])
            if done & ((step - 1) * step**j):
                break
    for i in range(done, count):
        assert groups is not None
        level[0] = level[0] + groups[..., i, :, :]
    for j in range(1, 4):
        level[0] = level[0] + level[j]
    first = level[0][..., 0, :]
    for i in range(count * 4, size):
        first = first + rows[..., i, :]
    for j in range(1, 4):
        first = first + level[0][..., j, :]
    tail = chain(terms[..., size * vector :]) if terms.shape[-1] > size * vector else torch.zeros(terms.shape[:-1])
    for i in range(vector):
        tail = tail + first[..., i]
    return tail


def quantise_e4m3(
    x: torch.Tensor, amax: torch.Tensor, top: float, power_of_two: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Grid values and scales of x under the largest magnitudes `amax` (broadcast to x)."""
    scale = torch.where(amax < 2.0**-100, torch.ones_like(amax), amax / top)
    if power_of_two:
        fraction, exponent = torch.frexp(scale)
        scale = torch.ldexp(torch.ones_like(scale), exponent - (fraction == 0.5).to(exponent.dtype))
    grid = (x / scale).clamp(-top, top).to(torch.float8_e4m3fn).to(FP32)
    return grid, scale
