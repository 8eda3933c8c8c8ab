"""Numbers that rows show are read off right, and none is where rows show none."""

import math

import pytest
import torch

from tests.diagnose.simulate.cases import BF16, randn
from zerogap.diagnose.simulate import shown


@pytest.mark.parametrize(
    ("value", "relative", "wanted"),
    [
        (0.62507, 3e-4, 0.625),
        (12.31, 0.05, 12.5),
        (1.4142, 1e-4, math.sqrt(2)),
        (0.07692, 1e-4, 1 / 13),
        (0.22134, 1e-4, 1.4 / math.sqrt(40)),
        (-3.01, 0.01, -3.0),
        (49.0, 0.04, 50.0),
    ],
)
def test_simple_numbers_near_a_value(value: float, relative: float, wanted: float) -> None:
    found = shown.near(value, relative, 16)
    assert any(math.isclose(n, wanted, rel_tol=1e-12) for n in found), found
    assert found[-1] == value and all(abs(n / value - 1) <= relative * 1.000001 for n in found)


def test_no_number_is_near_nothing() -> None:
    assert shown.near(0.0, 0.1) == [] and shown.near(math.inf, 0.1) == []


@pytest.mark.parametrize("wanted", [0.0625, 1.3, -2.0, 12.0])
def test_a_factor_and_a_cap(wanted: float) -> None:
    x = 6 * randn(20, 40)
    found = shown.factor(x, (wanted * x).to(BF16))
    assert found is not None and abs(found / wanted - 1) < 1e-3
    if wanted > 1:
        cap = shown.cap(x, (wanted * torch.tanh(x / wanted)).to(BF16))
        assert cap is not None and abs(cap / wanted - 1) < 0.02


def test_what_is_no_factor_and_no_cap() -> None:
    x = randn(20, 40)
    assert shown.factor(x, x) is None and shown.factor(x, x.to(BF16)) is None
    assert shown.factor(x, randn(20, 40, seed=1)) is None and shown.factor(x, x.abs()) is None
    assert shown.cap(x, x.to(BF16)) is None


def test_a_slope_and_a_limit() -> None:
    g, u = 2 * randn(30, 50), 2 * randn(30, 50, seed=1)
    slope = shown.sigmoid_slope(g, (g * torch.sigmoid(1.702 * g)).to(BF16))
    assert slope is not None and abs(slope / 1.702 - 1) < 0.01
    found = shown.limit(u, u.clamp(-1.5, 1.5).to(BF16))
    assert found is not None and abs(found / 1.5 - 1) < 0.01 and shown.limit(u, u.to(BF16)) is None


@pytest.mark.parametrize("cap", [3.0, 12.5])
def test_a_cap_and_a_factor_of_scores(cap: float) -> None:
    scores, values = 5 * randn(2, 24, 24).double(), randn(2, 24, 16, seed=1).double()

    def rows(changed: torch.Tensor) -> list[shown.Rows]:
        seen = torch.ones(24, 24, dtype=torch.bool).tril()
        out = torch.softmax(changed.masked_fill(~seen, -math.inf), -1) @ values
        return [shown.Rows(scores, values, out.to(BF16).double())]

    found = shown.attention_cap(rows(cap * torch.tanh(scores / cap)))
    assert found is not None and abs(found / cap - 1) < 0.02
    factor = shown.attention_factor(rows(scores * 0.7))
    assert factor is not None and abs(factor / 0.7 - 1) < 0.02
    assert shown.attention_cap(rows(scores)) is None and shown.attention_factor(rows(scores)) is None


def test_turns() -> None:
    """Offsets row by row, the angle of each pair, and the base behind them."""
    size, theta = 32, 5e5
    wave = theta ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
    positions = torch.arange(40)
    beyond = torch.where(positions < 15, 0, 700)
    before = torch.complex(randn(40, 3, 16).double(), randn(40, 3, 16, seed=1).double())
    angle = (positions + beyond)[:, None] * wave
    turned = shown.phasors(before, before * torch.polar(torch.ones_like(angle), angle)[:, None])
    assert torch.equal(shown.offsets(turned, positions, wave, 1000), beyond)
    hidden = turned.clone()
    hidden[7] = 0.0
    assert shown.offsets(hidden, positions, wave, 1000)[7] == beyond[6], "a row that was not recorded"
    angle = positions[:, None] * wave
    turned = shown.phasors(before, before * torch.polar(torch.ones_like(angle), angle)[:, None])
    seen = shown.waves(turned, positions)
    assert torch.allclose(seen, wave, rtol=1e-6, atol=1e-9)
    assert [round(b) for b in shown.bases_of(seen, size)] == [500_000]
    assert not list(shown.ratio(seen, wave)) and [round(f, 6) for f in shown.ratio(seen / 8, wave)] == [0.125]
