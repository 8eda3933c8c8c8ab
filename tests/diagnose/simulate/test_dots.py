"""Every order of a dot product against plain loops over Python numbers, bit by bit."""

import itertools
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.diagnose.simulate.cases import BF16, FP32, cancelling
from zerogap.diagnose.simulate import dots

ROWS, COLUMNS, WIDTH = 3, 4, 40


def rounded(exact: Fraction) -> np.float32:
    """To the nearest FP32 number (operands here are never halfway between two)."""
    near = np.float32(float(exact))
    around = (near, np.nextafter(near, np.float32(-np.inf)), np.nextafter(near, np.float32(np.inf)))
    return min(around, key=lambda n: abs(Fraction(float(n)) - exact))


def add(x: np.float32, y: np.float32) -> np.float32:
    return np.float32(x + y)


def chain(x: Sequence[np.float32], w: Sequence[np.float32], primitive: str) -> np.float32:
    """One accumulator from +0 over the elements in their order."""
    places = list(range(len(x)))
    if primitive == "dot2":  # pairs, the odd element first
        places = [k for i in range(0, len(x), 2) for k in (i + 1, i) if k < len(x)]
    total = np.float32(0)
    for k in places:
        if primitive == "mul+add":
            total = add(total, np.float32(x[k] * w[k]))
        else:
            total = rounded(Fraction(float(total)) + Fraction(float(x[k])) * Fraction(float(w[k])))
    return total


def halved(values: list[np.float32]) -> np.float32:
    while len(values) > 1:
        half = len(values) // 2
        values = [add(values[i], values[half + i]) for i in range(half)]
    return values[0]


def adjacent(values: list[np.float32]) -> np.float32:
    while len(values) > 1:
        pairs = [add(values[i], values[i + 1]) for i in range(0, len(values) - 1, 2)]
        values = pairs + values[len(values) - len(values) % 2 :]
    return values[0]


def part(x: list[np.float32], w: list[np.float32], order: str, primitive: str) -> np.float32:
    if order == "pairwise":
        return adjacent([np.float32(a * b) for a, b in zip(x, w)])
    if order == "descending":
        x, w = x[::-1], w[::-1]
    if order.startswith("lanes"):
        count = int(order.split()[-1])
        return halved([chain(x[lane::count], w[lane::count], primitive) for lane in range(count)])
    return chain(x, w, primitive)


def expected(x: torch.Tensor, w: torch.Tensor, order: str, primitive: str, split: str) -> torch.Tensor:
    out = np.zeros((len(x), len(w)), np.float32)
    for i, row in enumerate(x.float().numpy()):
        for j, column in enumerate(w.float().numpy()):
            borders = dots.cuts(split, len(row))
            parts = [part(list(row[b:e]), list(column[b:e]), order, primitive) for b, e in borders]
            if split.endswith("tree"):
                out[i, j] = adjacent(parts)
                continue
            if split.endswith("descending"):
                parts = parts[::-1]
            if split.endswith("ring"):  # four columns in runs of one for four parts: run c starts at part c + 1
                start = j * len(parts) // COLUMNS + 1
                parts = [parts[(start + step) % len(parts)] for step in range(len(parts))]
            total = parts[0]
            for more in parts[1:]:
                total = add(total, more)
            out[i, j] = total
    return torch.from_numpy(out)


@pytest.mark.parametrize(
    ("dtype", "order", "primitive", "split"),
    [
        (BF16, "ascending", "dot2", "1"),
        (BF16, "ascending", "fma", "1"),
        (BF16, "descending", "fma", "1"),
        (BF16, "descending", "dot2", "1"),
        (FP32, "ascending", "fma", "1"),
        (FP32, "ascending", "mul+add", "1"),
        (FP32, "descending", "fma", "1"),
        (FP32, "pairwise", "fma", "1"),
        *((FP32, f"lanes of {n}", primitive, "1") for n in (2, 4, 8) for primitive in ("fma", "mul+add")),
        *((BF16, f"lanes of {n}", "fma", "1") for n in (2, 4, 8)),
        *((BF16, "ascending", "dot2", split) for split in ("blocks of 16", "4 parts, tree", "3 parts, ascending")),
        *((FP32, "ascending", "fma", f"4 parts, {join}") for join in ("tree", "ascending", "descending", "ring")),
        (FP32, "lanes of 4", "fma", "2 parts, ascending"),
    ],
)
def test_a_dot_product_is_the_loop(dtype: torch.dtype, order: str, primitive: str, split: str) -> None:
    x, w = cancelling(ROWS, COLUMNS, WIDTH, dtype)
    got = dots.dot(x, w, order, primitive, split)
    assert torch.equal(got, expected(x, w, order, primitive, split))


def test_orders_differ_on_this_data() -> None:
    """Else the loops would prove nothing."""
    x, w = cancelling(ROWS, COLUMNS, WIDTH, FP32)
    forms = [
        dots.dot(x, w, *how)
        for how in (
            ("ascending", "fma"),
            ("descending", "fma"),
            ("ascending", "mul+add"),
            ("lanes of 4", "fma"),
            ("pairwise", "fma"),
            ("ascending", "fma", "4 parts, tree"),
            ("ascending", "fma", "4 parts, ring"),
        )
    ]
    assert all(not torch.equal(a, b) for i, a in enumerate(forms) for b in forms[:i])


@pytest.mark.parametrize("narrow", ["bf16", "fp16"])
def test_narrow_accumulators(narrow: str) -> None:
    """Every partial sum is rounded; of narrow parts only each part's sum and their joins."""
    x, w = cancelling(ROWS, COLUMNS, WIDTH, FP32)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[narrow]
    total = torch.zeros(ROWS, COLUMNS)
    for k in range(WIDTH):
        total = (total + x[:, k, None] * w[None, :, k]).to(dtype).float()
    assert torch.equal(dots.dot(x, w, "ascending", "mul+add", "1", narrow), total)
    parts = [dots.dot(x[:, b:e], w[:, b:e], "ascending", "fma").to(dtype).float() for b, e in ((0, 20), (20, 40))]
    joined = (parts[0] + parts[1]).to(dtype).float()
    assert torch.equal(dots.dot(x, w, "ascending", "fma", "2 parts, ascending", f"{narrow} parts"), joined)


def test_a_tensor_core_truncates_what_it_aligns() -> None:
    """One instruction adds 1, 2^-24 and -1: the small product is cut to 25 bits below the largest, and is still there;
    of E4M3, with 13 bits, it is lost."""
    x, w = torch.tensor([[1.0, 2.0**-24, -1.0]]), torch.ones(1, 3)
    assert dots.tensor_core(x, w).item() == 2.0**-24
    assert dots.tensor_core(x, w, 32, 13, 13).item() == 0.0
    many = torch.cat([torch.ones(1, 16), torch.full((1, 16), 2.0**-24)], 1)
    assert dots.tensor_core(many, torch.ones(1, 32)).item() == 16.0, "below the last kept bit of the sum"


def test_scales_are_applied_to_sums_of_codes() -> None:
    grid_x, grid_w = torch.tensor([[3.0, -2.0, 5.0, 1.0]]), torch.tensor([[2.0, 4.0, 1.0, -7.0]])
    scale_x, scale_w = torch.tensor([[0.1, 0.3]]), torch.tensor([[0.7, 0.2]])
    first, second = (np.float32(a) * np.float32(b) for a, b in ((0.1, 0.7), (0.3, 0.2)))
    begun = rounded(Fraction(-2) * Fraction(float(first)))
    wanted = rounded(Fraction(-2) * Fraction(float(second)) + Fraction(float(begun)))
    got = dots.fp8_dot((grid_x, scale_x), (grid_w, scale_w), 2, "fma")
    assert got.item() == float(wanted)


def test_splits_of_an_axis_are_each_of_their_own() -> None:
    names = dots.splits(96)
    assert names[0] == "1" and len(names) == len(set(names))
    for name in names[1:]:
        borders = dots.cuts(name, 96)
        assert borders[0][0] == 0 and borders[-1][1] == 96
        assert all(e == b for (_, e), (b, _) in itertools.pairwise(borders))
