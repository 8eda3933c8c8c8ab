"""How much time is left: from what steps and evaluations of each arm have taken so far."""

import math
from collections import defaultdict

Work = tuple[str, str]
"""(kind of work, arm): `step` or `evaluation` or `setup`, and whose."""


class Clock:
    """Keeps the seconds of finished work. Mutated by its calls."""

    def __init__(self) -> None:
        self._seconds: dict[Work, list[float]] = defaultdict(list)
        self._left: dict[Work, int] = defaultdict(int)

    def plan(self, kind: str, arm: str, count: int) -> None:
        """So many more pieces of work are to be done."""
        self._left[kind, arm] += count

    def seen(self, kind: str, arm: str, seconds: float) -> None:
        """A piece that was never planned took so long: one that an earlier process did."""
        self._seconds[kind, arm].append(seconds)

    def done(self, kind: str, arm: str, seconds: float) -> None:
        """One piece is done."""
        self.seen(kind, arm, seconds)
        self._left[kind, arm] = max(0, self._left[kind, arm] - 1)

    def skip(self, kind: str, arm: str, count: int) -> None:
        """So many pieces need not be done: an earlier process did them."""
        self._left[kind, arm] = max(0, self._left[kind, arm] - count)

    def left(self) -> float | None:
        """Seconds; an arm that has not been seen takes the mean of those that have. None: nothing is known yet."""
        total = 0.0
        for (kind, arm), count in self._left.items():
            if not count:
                continue
            own = self._seconds.get((kind, arm), [])
            others = [s for (k, _), seconds in self._seconds.items() if k == kind for s in seconds]
            known = own or others
            if not known:
                return None
            total += count * math.fsum(known) / len(known)
        return total

    def __str__(self) -> str:
        left = self.left()
        return "?" if left is None else f"{left / 60:.0f} min" if left >= 100 else f"{left:.0f} s"
