"""Sums that no order or grouping can change, and the moments of a set of numbers that are built on them.

A metric or a loss is summed over micro-batches, packs and ranks of any size. The exact sum makes the result the same
number for every such split; it is rounded once, when somebody looks at it.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from fractions import Fraction

import numpy as np


def exact_sum(values: np.ndarray) -> Fraction:
    """The exact sum of finite float64 (or narrower) values, so that neither order nor grouping can change a bit.

    Mantissas are added as integers per binary exponent, in two halves (no overflow below 2^36 values).
    """
    mantissas, exponents = np.frexp(np.asarray(values, np.float64).ravel())
    assert np.isfinite(mantissas).all(), "only finite numbers have an exact sum"
    scaled = np.ldexp(mantissas, 53).astype(np.int64)
    total = Fraction(0)
    for exponent in np.unique(exponents):
        part = scaled[exponents == exponent]
        whole = (int((part >> 27).sum()) << 27) + int((part & (2**27 - 1)).sum())
        total += whole * Fraction(2) ** (int(exponent) - 53)
    return total


@dataclasses.dataclass(frozen=True)
class Moments:
    """Exact sum, count, minimum and maximum of a set of numbers; two of them pool as if they had been one set."""

    total: Fraction = Fraction(0)
    count: int = 0
    minimum: float = math.inf
    maximum: float = -math.inf

    @classmethod
    def of(cls, values: np.ndarray) -> "Moments":
        """Moments of finite values of any shape; of none: an empty set."""
        values = np.asarray(values, np.float64)
        if not values.size:
            return cls()
        assert np.isfinite(values).all(), "moments are taken of finite numbers only"
        return cls(exact_sum(values), values.size, float(values.min()), float(values.max()))

    def __add__(self, other: "Moments") -> "Moments":
        return Moments(
            self.total + other.total,
            self.count + other.count,
            min(self.minimum, other.minimum),
            max(self.maximum, other.maximum),
        )

    @property
    def mean(self) -> float:
        """The correctly rounded mean; 0.0 of an empty set."""
        return float(self.total / self.count) if self.count else 0.0


def pool(metrics: Iterable[Mapping[str, Moments]]) -> dict[str, Moments]:
    """Moments of the union, name by name, over micro-batches or ranks of any sizes; a name may be absent in some."""
    pooled: dict[str, Moments] = {}
    for part in metrics:
        for name, moments in part.items():
            pooled[name] = pooled.get(name, Moments()) + moments
    return pooled
