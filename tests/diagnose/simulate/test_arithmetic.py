"""Single steps of other machines' arithmetic against plain Python, bit by bit."""

import math

import numpy as np
import pytest
import torch

from tests.diagnose.simulate.cases import randn
from zerogap.diagnose.simulate import arithmetic


def test_formats() -> None:
    x = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11, -1 - 2.0**-7 + 2.0**-20])
    assert arithmetic.round_to(x, "bf16").tolist() == [1.0, 1 + 2.0**-6, 1.0, 1.0, -1 - 2.0**-7]
    assert arithmetic.round_to(x, "bf16 truncated").tolist() == [1.0, 1 + 2.0**-7, 1.0, 1.0, -1.0]
    assert arithmetic.round_to(x, "tf32")[2:4].tolist() == [1.0, 1 + 2.0**-9]
    assert arithmetic.round_to(x, "tf32 truncated")[2:4].tolist() == [1.0, 1 + 2.0**-10]
    assert arithmetic.round_to(x, "fp16")[2:4].tolist() == [1.0, 1 + 2.0**-9]
    assert torch.equal(arithmetic.round_to(x, "none"), x)


def loop(terms: np.ndarray) -> np.float32:
    total = np.float32(0)
    for term in terms:
        total = np.float32(total + term)
    return total


@pytest.mark.parametrize("count", [1, 2, 3, 7, 16, 21])
def test_sums(count: int) -> None:
    terms = randn(count, seed=3)
    values = terms.numpy()
    assert arithmetic.chain(terms).item() == loop(values)
    padded = np.concatenate([values, np.zeros((1 << (count - 1).bit_length()) - count, np.float32)])
    while len(padded) > 1:
        padded = padded[0::2] + padded[1::2]
    assert arithmetic.pairwise(terms).item() == padded[0]
    parts = list(values)
    while len(parts) > 1:
        odd = parts[len(parts) - len(parts) % 2 :]
        parts = [np.float32(parts[i] + parts[i + 1]) for i in range(0, len(parts) - 1, 2)] + odd
    assert arithmetic.tree(list(terms)).item() == parts[0]


@pytest.mark.parametrize("width", [4, 8, 16])
def test_lanes_and_halving(width: int) -> None:
    a, b = randn(24, 53, seed=1), randn(24, 53, seed=2)
    got = arithmetic.lanes(a, b, width, fused=False)
    for row, products in enumerate((a * b).numpy()):
        lanes = [loop(products[i::width]) for i in range(width)]
        assert got[row].tolist() == [float(v) for v in lanes]
        while len(lanes) > 1:
            half = len(lanes) // 2
            lanes = [np.float32(lanes[i] + lanes[half + i]) for i in range(half)]
        assert arithmetic.halving(got)[row].item() == lanes[0]


@pytest.mark.parametrize("size", [5, 64, 576, 1000, 4096])
def test_the_cascade_is_torchs_own_sum(size: int) -> None:
    """Of some vector width, which depends on the machine."""
    terms = randn(3, size, seed=5)
    assert any(torch.equal(arithmetic.cascade(terms, vector), terms.sum(-1)) for vector in (4, 8, 16))


def test_exponentials_are_close_to_exact_ones() -> None:
    x = -torch.linspace(0, 80, 4001)
    exact = x.double().exp()
    for function, ulps in ((arithmetic.exp, 2), (arithmetic.fast_exp, 20)):
        assert ((function(x).double() - exact).abs() <= ulps * 2.0**-23 * exact).all(), function
    assert ((arithmetic.faster_exp(x).double() - exact).abs() <= 2.0**-11 * exact).all()
    assert arithmetic.exp(torch.tensor([-100.0])).item() == 0.0


@pytest.mark.parametrize("top", [448.0, 240.0])
@pytest.mark.parametrize("power", [False, True])
def test_codes_and_scales(top: float, power: bool) -> None:
    x = randn(6, 32)
    amax = x.abs().amax(1, keepdim=True).expand(x.shape)
    grid, scales = arithmetic.quantise_e4m3(x, amax, top, power)
    for i in range(6):
        wanted = np.float32(amax[i, 0].item()) / np.float32(top)
        wanted = 2.0 ** math.ceil(math.log2(wanted)) if power else wanted
        assert scales[i, 0].item() == float(wanted)
    assert torch.equal(grid, grid.to(torch.float8_e4m3fn).float()) and grid.abs().max() <= top
    step = 2.0**-3 * grid.abs().clamp_min(2.0**-6)  # at most half a step of three bits away
    assert ((x / scales - grid).abs() <= step / 2 + 2.0**-10).all()
