"""SiLU(gate) * up: the contract literally, accuracy, independence of rows, gradients, repeatability."""

import math

import pytest
import torch

from tests.bits import assert_same_bits, hard_values, unit_values
from tests.ops import elementwise_reference as reference
from tests.ops.elementwise_cases import DTYPES, FP32, UNIT
from zerogap.ops.activation import silu_mul
from zerogap.ops.cpu import library

both = pytest.mark.parametrize("dtype", DTYPES)
SHAPES = [(1, 1536), (7, 100), (300, 33), (2, 1)]


def run(gate, up, d):
    gate, up = gate.clone().requires_grad_(), up.clone().requires_grad_()
    out = silu_mul(gate, up)
    out.backward(d)
    return out.detach(), gate.grad, up.grad


def data(dtype, shape):
    return [hard_values(shape, dtype, seed, spread=6) for seed in range(3)]


@both
@pytest.mark.parametrize("shape", SHAPES)
def test_the_contract(dtype, shape) -> None:
    gate, up, d = data(dtype, shape)
    out, d_gate, d_up = run(gate, up, d)
    g, u, s = (reference.array(t) for t in (gate, up, d))
    assert_same_bits(out, reference.stored(reference.silu_mul(g, u), dtype), "out")
    expected_gate, expected_up = reference.silu_mul_grad(g, u, s)
    assert_same_bits(d_gate, reference.stored(expected_gate, dtype), "d_gate")
    assert_same_bits(d_up, reference.stored(expected_up, dtype), "d_up")
    with torch.no_grad():
        assert_same_bits(silu_mul(gate, up), out, "without a graph")


@both
def test_accuracy(dtype) -> None:
    """exp is off by at most 2 roundings (1e-7), so sigmoid by 4; each product adds one. silu'(g) is a sum of two terms,
    sig and sig * g * rest, each that accurate."""
    gate, up, d = (unit_values((200, 64), dtype, s) * k for s, k in ((0, 8), (1, 1), (2, 1)))
    out, d_gate, d_up = run(gate, up, d)
    g, u, s = (t.double() for t in (gate, up, d))
    sig, rest = torch.sigmoid(g), torch.sigmoid(-g)
    slope, parts = sig * (1 + g * rest), sig * (1 + (g * rest).abs())
    for mine, exact, size in (
        (out, g * sig * u, (g * sig * u).abs()),
        (d_up, s * g * sig, (s * g * sig).abs()),
        (d_gate, s * u * slope, (s * u).abs() * parts),
    ):
        bound = size * 12 * UNIT[FP32] + exact.abs() * UNIT[dtype] * 1.01
        assert ((mine.double() - exact).abs() <= bound).all()


@both
def test_gradients_are_autograd(dtype) -> None:
    """The formula itself against float64 autograd."""
    gate, up, d = (unit_values((20, 16), dtype, s) for s in range(3))
    g, u = gate.double().requires_grad_(), up.double().requires_grad_()
    (torch.nn.functional.silu(g) * u).backward(d.double())
    _, d_gate, d_up = run(gate, up, d)
    for mine, exact in ((d_gate, g.grad), (d_up, u.grad)):
        assert ((mine.double() - exact).abs() <= exact.abs() * UNIT[dtype] * 1.01 + 2.0**-20).all()


@both
def test_extremes(dtype) -> None:
    """Nothing overflows on the way; zeros keep their sign; what is not finite shows."""
    gate = torch.tensor([[1e30, -1e30, 88.0, -88.0, -1e4, 0.0, -0.0, 1e-39]], dtype=FP32).to(dtype)
    up = torch.ones_like(gate)
    out, d_gate, d_up = run(gate, up, up)
    assert torch.isfinite(out).all() and torch.isfinite(d_gate).all() and torch.isfinite(d_up).all()
    assert_same_bits(out[0, 5:7], torch.tensor([0.0, -0.0], dtype=dtype), "zeros")
    assert_same_bits(d_gate[0, 5:7], torch.tensor([0.5, 0.5], dtype=dtype), "slope at zero")
    assert out[0, 0] == gate[0, 0] and out[0, 1] == 0 and d_gate[0, 0] == 1 and d_gate[0, 1] == 0
    assert silu_mul(torch.full_like(gate, math.nan), up).isnan().all()


@both
def test_rows_threads_and_runs(dtype) -> None:
    gate, up, d = data(dtype, (90, 101))
    whole = run(gate, up, d)
    for threads in (1, 2, 3):
        with library.use_threads(threads):
            for one, two in zip(run(gate, up, d), whole, strict=True):
                assert_same_bits(one, two, f"{threads} threads")
    for t in (0, 50, 89):
        row = slice(t, t + 1)
        for one, two in zip(run(gate[row], up[row], d[row]), whole, strict=True):
            assert_same_bits(one, two[row], f"row {t} alone")
    bad = gate.clone()
    bad[1::2] = math.nan
    for one, two in zip(run(bad, up, d), whole, strict=True):
        assert_same_bits(one[::2], two[::2], "beside NaN")


@both
def test_recorded_program(dtype) -> None:
    gate, up, _ = data(dtype, (9, 100))
    with torch.no_grad(), library.record(rows=(gate, up)) as program:
        out = silu_mul(gate, up)
    for rows in (1, 6, 9):
        out.zero_()
        program.run(rows=rows)
        assert_same_bits(out[:rows], silu_mul(gate[:rows], up[:rows]), "rows that were asked for")
        assert not out[rows:].any(), "no other row is written"
