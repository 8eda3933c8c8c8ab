"""Intervals, paired differences and verdicts of the accuracy benchmark."""

import math
import statistics

import pytest

from benchmarks.fp8_accuracy.intervals import Interval, interval, paired_difference, t_probability, t_quantile, verdict

# Two-sided quantiles of Student's t, as printed in tables (three decimals).
TABLE = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 10: 2.228, 29: 2.045, 30: 2.042, 120: 1.980}


@pytest.mark.parametrize(("freedom", "expected"), TABLE.items())
def test_quantiles_are_those_of_the_tables(freedom, expected):
    assert round(t_quantile(freedom), 3) == expected


def test_other_confidences():
    assert round(t_quantile(4, 0.99), 3) == 4.604
    assert round(t_quantile(7, 0.90), 3) == 1.895


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 8])
def test_probability_is_the_integral_of_the_density(freedom):
    factor = math.gamma((freedom + 1) / 2) / (math.sqrt(freedom * math.pi) * math.gamma(freedom / 2))
    t, count = 1.7, 20_000
    density = [factor * (1 + (t * (i + 0.5) / count) ** 2 / freedom) ** (-(freedom + 1) / 2) for i in range(count)]
    # The midpoint rule's error is h^2 t / 24 max|f''| < 1e-8 here.
    assert abs(t_probability(t, freedom) - 2 * math.fsum(density) * t / count) < 1e-8


def test_interval_against_the_definition():
    values = [0.61, 0.58, 0.64, 0.60, 0.66]
    found = interval(values)
    reach = 2.7764451 * statistics.stdev(values) / math.sqrt(5)
    assert math.isclose(found.mean, statistics.fmean(values), rel_tol=1e-15)
    assert math.isclose(found.high - found.mean, reach, rel_tol=1e-7)
    assert math.isclose(found.mean - found.low, reach, rel_tol=1e-7)
    assert found.count == 5


def test_one_value_has_no_interval():
    assert interval([0.5]) == Interval(0.5, None, None, 1)
    assert str(interval([0.5])) == "0.500"
    assert interval([0.5, 0.5]) == Interval(0.5, 0.5, 0.5, 2)


def test_differences_are_taken_seed_by_seed():
    ours, baseline = {0: 0.5, 1: 0.9, 2: 0.1}, {2: 0.0, 1: 0.8, 0: 0.4, 7: 99.0}
    found = paired_difference(ours, baseline)
    assert found.count == 3
    assert math.isclose(found.mean, 0.1, rel_tol=1e-12)
    assert found.high - found.low < 1e-12  # every pair differs by 0.1, however far apart the seeds are
    assert paired_difference({0: 1.0}, {1: 1.0}) is None


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (-0.02, 0.02, "equal within 0.02"),
        (-0.010, -0.001, "equal within 0.02"),
        (0.001, 0.03, "better"),
        (-0.03, -0.001, "worse"),
        (-0.001, 0.021, "not resolved"),
        (-0.021, 0.0, "not resolved"),
        (-0.5, 0.5, "not resolved"),
    ],
)
def test_verdicts(low, high, expected):
    assert verdict(Interval((low + high) / 2, low, high, 5), 0.02) == expected


def test_one_seed_resolves_nothing():
    assert verdict(interval([0.4]), 0.02) == "not resolved"
