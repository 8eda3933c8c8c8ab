"""Means with confidence intervals, paired differences, and what may be said of them.

Seeds are the repetitions: an interval is Student's t over them, `mean +- t(n - 1) * s / sqrt(n)`. It covers what
changes from seed to seed; that the held-out prompts are a fixed set is part of the question, not of the noise.
Differences are taken seed by seed. Intervals are not adjusted for the number of comparisons.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

CONFIDENCE = 0.95
MARGIN = 0.02
"""The smallest difference of an accuracy or a reward that is called one: two points of a hundred, stated beforehand."""


@dataclasses.dataclass(frozen=True)
class Interval:
    """Mean of n values with its confidence interval; `low` and `high` are None for fewer than two values."""

    mean: float
    low: float | None
    high: float | None
    count: int

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.mean:.3f}"
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"

    def signed(self) -> str:
        """The same with signs, for a difference."""
        if self.low is None or self.high is None:
            return f"{self.mean:+.3f}"
        return f"{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


def t_probability(t: float, freedom: int) -> float:
    """P(|T| <= t) of Student's t with a whole number of degrees of freedom (Abramowitz and Stegun 26.7.3, 26.7.4)."""
    angle = math.atan2(t, math.sqrt(freedom))
    cosine = math.cos(angle)
    odd = freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(2 + odd, freedom + 1, 2):
        total += term
        term *= cosine * cosine * (k - 1) / k
    if odd:
        return 2.0 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total


def t_quantile(freedom: int, confidence: float = CONFIDENCE) -> float:
    """The t with P(|T| <= t) = confidence, by bisection."""
    assert freedom >= 1 and 0.0 < confidence < 1.0, "degrees of freedom from 1, confidence below 1"
    low, high = 0.0, 1.0
    while t_probability(high, freedom) < confidence:
        high *= 2.0
    for _ in range(80):
        middle = (low + high) / 2.0
        low, high = (middle, high) if t_probability(middle, freedom) < confidence else (low, middle)
    return high


def interval(values: Sequence[float]) -> Interval:
    """Mean and confidence interval of at least one value."""
    count = len(values)
    mean = math.fsum(values) / count
    if count < 2:
        return Interval(mean, None, None, count)
    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (count - 1))
    reach = t_quantile(count - 1) * deviation / math.sqrt(count)
    return Interval(mean, mean - reach, mean + reach, count)


def paired_difference(ours: Mapping[int, float], baseline: Mapping[int, float]) -> Interval | None:
    """Interval of `ours - baseline` over the seeds that both have; None if there is none."""
    seeds = sorted(set(ours) & set(baseline))
    return interval([ours[seed] - baseline[seed] for seed in seeds]) if seeds else None


def verdict(difference: Interval, margin: float = MARGIN) -> str:
    """What the interval of a difference says, where more is better.

    `equal within MARGIN`: all of it is within +-margin. `better`, `worse`: all of it is above, below 0, and not all of
    it within the margin. `not resolved`: it holds 0 and reaches beyond the margin, or there is one seed only.
    """
    low, high = difference.low, difference.high
    if low is None or high is None:
        return "not resolved"
    if -margin <= low and high <= margin:
        return f"equal within {margin:g}"
    return "better" if low > 0.0 else "worse" if high < 0.0 else "not resolved"
