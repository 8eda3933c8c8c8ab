"""The tensor core's sum against the same rule in exact fractions, one product at a time."""

import math
from fractions import Fraction

import pytest
import torch

from tests.bits import assert_same_bits, hard_values
from zerogap.diagnose.simulate.dots import tensor_core

FORMS = [(torch.bfloat16, 16, 25, 23), (torch.float16, 16, 25, 23), (torch.float8_e4m3fn, 32, 13, 13)]


def exponent(x: float) -> int:
    return -126 if x == 0 else math.frexp(x)[1] - 1


def truncated(x: Fraction, unit: Fraction) -> Fraction:
    return math.trunc(x / unit) * unit


def by_fractions(x: list[float], w: list[float], step: int, fraction: int, kept: int) -> float:
    """One element: products and accumulator cut at a common unit, added exactly, cut to `kept` bits."""
    total = 0.0
    for k in range(0, len(x), step):
        pairs = [(a, b) for a, b in zip(x[k : k + step], w[k : k + step])]
        tops = [exponent(a) + exponent(b) for a, b in pairs if a * b != 0]
        unit = Fraction(2) ** (max([exponent(total), -126, *tops]) - fraction)
        summed = sum((truncated(Fraction(a) * Fraction(b), unit) for a, b in pairs), truncated(Fraction(total), unit))
        last = Fraction(2) ** ((0 if summed == 0 else exponent(float(summed))) - kept)
        total = float(truncated(summed, last))
    return total


@pytest.mark.parametrize(("dtype", "step", "fraction", "kept"), FORMS)
@pytest.mark.parametrize("width", [32, 96, 160])
def test_every_instruction_truncates_as_the_hardware_does(dtype, step, fraction, kept, width):
    x = hard_values((4, width), seed=width).clamp(-400, 400).to(dtype).float()
    w = hard_values((3, width), seed=width + 1).clamp(-400, 400).to(dtype).float()
    x[0] = 0.0
    found = tensor_core(x, w, step, fraction, kept)
    expected = [[by_fractions(a, b, step, fraction, kept) for b in w.tolist()] for a in x.tolist()]
    assert_same_bits(found, torch.tensor(expected))
    exact = (x.double() @ w.double().T).float()
    assert (found[1:] != exact[1:]).any(), "truncation shows in such data"
