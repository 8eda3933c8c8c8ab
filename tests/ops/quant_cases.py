"""Inputs on which a block quantiser may go wrong, and all its outputs on them.

Run as a module, it prints the digests of all outputs as JSON: so instruction sets, each in its own process, are
compared.
"""

import json

import numpy as np
import torch

from tests.bits import hard_values, unit_values
from tests.ops.quant_reference import code_values
from zerogap.ops import quant
from zerogap.ops.cpu import library
from zerogap.ops.cpu import quant as kernels
from zerogap.ops.digest import digest

BF16 = torch.bfloat16
FORMATS = ("fp32", "pow2")
SHAPES = ((1, 1), (3, 130), (129, 257), (200, 96), (256, 128))


def grid_ties(shape: tuple[int, int], seed: int = 0) -> torch.Tensor:
    """Blocks of grid values and exact midpoints of neighbours, times 2^e, of either sign, zeros among them; the largest
    is 448 * 2^e, so that the scale is 2^e."""
    generator = np.random.default_rng(seed)
    grid = code_values()[:127]
    points = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2, [2.0**-10, 2.0**-11]])
    values = generator.choice(points, shape) * generator.choice([-1.0, 1.0], shape)
    values[:, ::128] = 448.0
    exponents = generator.integers(-80, 80, (-(-shape[0] // 128), -(-shape[1] // 128)))
    return torch.from_numpy(values * np.exp2(np.kron(exponents, np.ones((128, 128)))[: shape[0], : shape[1]])).to(BF16)


def sparse(shape: tuple[int, int], value: float) -> torch.Tensor:
    """Zeros, every other one negative, with `value` at one place of the last block."""
    x = torch.zeros(shape, dtype=BF16)
    x[:, ::2] = -0.0
    x[-1, -1] = value
    return x


def inputs(shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    """BF16 tensors by what is hard about them."""
    normal = unit_values(shape, BF16, seed=1)
    return {
        "random": normal,
        "wide": hard_values(shape, BF16, seed=2, spread=110),
        "cancelling": hard_values(shape, BF16, seed=3),
        "extreme": hard_values(shape, BF16, seed=4, spread=3) * 2.0**123,  # up to the largest BF16 numbers
        "small": hard_values(shape, BF16, seed=5, spread=8) * 2.0**-98,  # on both sides of the zero limit
        "tiny": hard_values(shape, BF16, seed=6, spread=12) * 2.0**-120,  # subnormals among them
        "ties": grid_ties(shape),
        "zeros": torch.zeros(shape, dtype=BF16),
        "negative zeros": -torch.zeros(shape, dtype=BF16),
        "one subnormal": sparse(shape, 2.0**-133),
        "one at the limit": sparse(shape, -(2.0**-100)),
        "one below the limit": sparse(shape, 2.0**-100 - 2.0**-108),
        "one largest": sparse(shape, torch.finfo(BF16).max),
    }


def outputs(x: torch.Tensor, scale_format: str) -> dict[str, torch.Tensor]:
    """Everything that the quantiser makes of x, as rows and as a weight."""
    n, k = x.shape
    grid, row_scales = quant.quantise_rows(x, scale_format)
    panels, transposed = kernels.allocate_panels(n, k), kernels.allocate_panels(k, n)
    scales = torch.empty(kernels.scales_shape(n, k))
    kernels.quantise_weight(x, scale_format, panels, transposed, scales)
    codes = kernels.unpack_codes(panels, n, k)
    return {
        "grid": grid,
        "row scales": row_scales,
        "panels": panels,
        "transposed": transposed,
        "scales": scales,
        "codes": codes,
        "value": quant.dequantise(codes, scales),
    }


def all_digests(threads: int) -> dict[str, str]:
    """Digests of all outputs on all inputs, by shape, input, scale format and output."""
    with library.use_threads(threads):
        return {
            f"{shape}/{what}/{scale_format}/{name}": digest(tensor)
            for shape in SHAPES
            for what, x in inputs(shape).items()
            for scale_format in FORMATS
            for name, tensor in outputs(x, scale_format).items()
        }


if __name__ == "__main__":
    print(json.dumps({"backend": library.backend(), "digests": all_digests(1)}))
