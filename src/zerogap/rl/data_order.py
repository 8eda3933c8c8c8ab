"""The order in which rows are trained: a pure function of (seed, position), so that a run resumes from a number.

Rows of one data set stand in epochs. Rows of several are interleaved by weight in periods: a period holds each data
set's share as a whole number of rows, spread evenly, and within its own data set every row comes once per epoch.
"""

import bisect
import dataclasses
import functools
import hashlib
import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

from zerogap.errors import ConfigError

LONGEST_PERIOD = 10_000  # positions; more would say that the weights are no ratio anybody meant


@dataclasses.dataclass(frozen=True)
class PromptOrder:
    """Which row stands at each position of the endless sequence of prompts.

    Epoch e is positions [e * num_rows, (e + 1) * num_rows). With `shuffle` its rows ascend by
    SHA-256(seed, epoch, row), else by row.
    """

    num_rows: int
    seed: int | str
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.num_rows < 1:
            raise ConfigError("data.train", self.num_rows, "there is no row to train on")

    def epoch(self, epoch: int) -> list[int]:
        """Row indices of one epoch, in order."""
        if not self.shuffle:
            return list(range(self.num_rows))
        return sorted(
            range(self.num_rows), key=lambda row: hashlib.sha256(f"{self.seed}/{epoch}/{row}".encode()).digest()
        )

    def take(self, position: int, count: int) -> list[int]:
        """Row indices at positions [position, position + count); may run over the end of an epoch."""
        taken: list[int] = []
        while len(taken) < count:
            epoch, offset = divmod(position + len(taken), self.num_rows)
            taken += self.epoch(epoch)[offset : offset + count - len(taken)]
        return taken


@dataclasses.dataclass(frozen=True)
class MixedOrder:
    """Which row stands at each position, where several data sets are mixed.

    Positions fall into periods of sum(shares). In a period the k-th row of a data set of share s stands in the order of
    (k + u) / s, with u in [0, 1) from SHA-256(seed, period, data set) (1/2 without `shuffle`), so that every stretch of
    positions holds the data sets nearly in proportion. A data set's rows follow in its own `PromptOrder`.

    Attributes:
        parts: row indices of each data set.
        shares: rows of each data set in a period.
    """

    parts: tuple[tuple[int, ...], ...]
    shares: tuple[int, ...]
    seed: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        assert len(self.parts) == len(self.shares) > 1 and min(self.shares) > 0, "a share for each of several data sets"
        for i, part in enumerate(self.parts):
            if not part:
                raise ConfigError(f"data.train[{i}]", 0, "there is no row to train on")

    def period(self, period: int) -> tuple[int, ...]:
        """The data set at each position of one period."""
        return _spread(self.shares, f"{self.seed}/{period}" if self.shuffle else "")

    def take(self, position: int, count: int) -> list[int]:
        """Row indices at positions [position, position + count)."""
        length = sum(self.shares)
        period, offset = divmod(position, length)
        begun = self.period(period)[:offset]
        before = [period * share + begun.count(i) for i, share in enumerate(self.shares)]
        chosen: list[int] = []
        while len(chosen) < count:
            period, offset = divmod(position + len(chosen), length)
            chosen += self.period(period)[offset : offset + count - len(chosen)]
        rows = []
        for i, part in enumerate(self.parts):
            own = PromptOrder(len(part), f"{self.seed}/{i}", self.shuffle)
            rows.append(iter(own.take(before[i], chosen.count(i))))
        return [self.parts[i][next(rows[i])] for i in chosen]


@functools.lru_cache(64)
def _spread(shares: tuple[int, ...], key: str) -> tuple[int, ...]:
    places = []
    for i, share in enumerate(shares):
        start = Fraction(1, 2)
        if key:
            start = Fraction(int.from_bytes(hashlib.sha256(f"{key}/{i}".encode()).digest()[:8]), 2**64)
        places += [((k + start) / share, i) for k in range(share)]
    return tuple(i for _, i in sorted(places))


def whole_shares(weights: Sequence[float]) -> tuple[int, ...]:
    """The smallest whole numbers in the ratio of the weights, each taken as the decimal number it is written as.

    Raises:
        ConfigError: their sum would exceed `LONGEST_PERIOD`.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    shares = tuple(number // math.gcd(*whole) for number in whole)
    if sum(shares) > LONGEST_PERIOD:
        raise ConfigError("data.train weights", list(weights), "choose small whole numbers, such as 3 and 1")
    return shares


def prompt_order(parts: Sequence[int], weights: Sequence[float], seed: int, shuffle: bool) -> PromptOrder | MixedOrder:
    """The order of rows.

    Args:
        parts: the data set of each row, ascending.
        weights: of each data set.

    Raises:
        ConfigError: a data set without a row, or weights in no sensible ratio.
    """
    if len(weights) == 1:
        return PromptOrder(len(parts), seed, shuffle)
    assert all(a <= b for a, b in itertools.pairwise(parts)), "rows stand by data set"
    edges = [bisect.bisect_left(parts, i) for i in range(len(weights) + 1)]
    rows = tuple(tuple(range(a, b)) for a, b in itertools.pairwise(edges))
    return MixedOrder(rows, whole_shares(weights), seed, shuffle)
