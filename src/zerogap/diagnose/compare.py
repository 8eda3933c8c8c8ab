"""What two sides disagree on: per-token log-probs aligned by ids, tensors by bits, and the statistics of both.

d = log-prob of B minus log-prob of A. A token is compared where both sides count it, both have read the same ids up to
it, and both recorded a number. Numbers are equal when their bits are (0 and -0 count as equal and are noted).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from zerogap.diagnose.trace import Pass, Trace

WORST = 20  # tokens that a report lists
EXPLAINED = 20.0  # by how much mean |d| must fall for a substitution to account for it
IMPROVED = 0.9  # share of differing tokens that must come closer

Arrays = tuple[np.ndarray, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Difference:
    """Two sets of log-probs over the same tokens. Attributes:
    a, b: float32 per sequence [N], N of the shorter side; NaN where not compared.
    missing_a, missing_b: bool [N]: counted tokens for which only the other side has a number.
    """

    a: Arrays
    b: Arrays
    missing_a: Arrays
    missing_b: Arrays

    @property
    def flat_a(self) -> np.ndarray:
        return np.concatenate([np.zeros(0, np.float32), *self.a])

    @property
    def flat_b(self) -> np.ndarray:
        return np.concatenate([np.zeros(0, np.float32), *self.b])

    @property
    def compared(self) -> np.ndarray:
        """bool [R] over all sequences."""
        return ~(np.isnan(self.flat_a) | np.isnan(self.flat_b))

    @property
    def differs(self) -> np.ndarray:
        """bool [R]: compared and not the same number."""
        return self.compared & (self.flat_a != self.flat_b)

    @property
    def d(self) -> np.ndarray:
        """float64 [R]; NaN where not compared, 0 where both are the same infinity."""
        a, b = self.flat_a.astype(np.float64), self.flat_b.astype(np.float64)
        with np.errstate(invalid="ignore"):
            return np.where(a == b, 0.0, b - a)

    @property
    def mean(self) -> float:
        """Mean |d| over compared tokens; infinite if any is."""
        values = np.abs(self.d[self.compared])
        return float(values.mean()) if len(values) else 0.0

    @property
    def num_missing(self) -> int:
        return int(sum(m.sum() for m in (*self.missing_a, *self.missing_b)))

    @property
    def same(self) -> bool:
        """True if something was compared, and nothing differs or is missing on one side."""
        return bool(self.compared.any()) and not self.differs.any() and not self.num_missing

    def with_arrays(self, a: Sequence[np.ndarray] | None = None, b: Sequence[np.ndarray] | None = None) -> "Difference":
        """The same tokens with other numbers on one side; NaN there counts as not compared."""
        return dataclasses.replace(
            self,
            a=self.a if a is None else tuple(np.where(np.isnan(o), o, n[: len(o)]) for o, n in zip(self.a, a)),
            b=self.b if b is None else tuple(np.where(np.isnan(o), o, n[: len(o)]) for o, n in zip(self.b, b)),
        )


def same_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Tokens from the first on that both sequences have."""
    count = min(len(a), len(b))
    unequal = np.flatnonzero(a[:count] != b[:count])
    return int(unequal[0]) if len(unequal) else count


def difference(a: Trace, b: Trace, pass_a: Pass | None = None, pass_b: Pass | None = None) -> Difference:
    """Align two traces, or one pass of each (default: their answers). A pass behind a prefix hit has no numbers of what
    came from the cache; that is not missing."""
    pass_a, pass_b = pass_a or a.recorded, pass_b or b.recorded
    logs_a, logs_b = pass_a.logprobs, pass_b.logprobs
    left, right, missing_a, missing_b = [], [], [], []
    for i, (one, other) in enumerate(zip(a.sequences, b.sequences)):
        count = min(len(one.ids), len(other.ids))
        counted = one.counted[:count] & other.counted[:count]
        counted = counted & (np.arange(count) < same_prefix(one.ids, other.ids))
        x, y = logs_a[i][:count].astype(np.float32), logs_b[i][:count].astype(np.float32)
        both = counted & ~np.isnan(x) & ~np.isnan(y)
        left.append(np.where(both, x, np.float32(np.nan)))
        right.append(np.where(both, y, np.float32(np.nan)))
        missing_a.append(counted & np.isnan(x) & ~np.isnan(y) & ~_cached(pass_a, x))
        missing_b.append(counted & ~np.isnan(x) & np.isnan(y) & ~_cached(pass_b, y))
    return Difference(tuple(left), tuple(right), tuple(missing_a), tuple(missing_b))


def _cached(found: Pass, values: np.ndarray) -> np.ndarray:
    """bool [N]: tokens before the first number of a sequence whose beginning came from a cache."""
    behind = found.path == "prefix_hit" and bool((~np.isnan(values)).any())
    return np.full(len(values), behind) & (np.cumsum(~np.isnan(values)) == 0)


def explains(before: Difference, after: Difference) -> bool:
    """True if a substitution accounts for the difference: nothing is left, or mean |d| is at least 20 times smaller and
    nine in ten of the tokens that differed have come closer; on at least half of the tokens that were compared."""
    kept = before.differs & after.compared
    if not before.differs.any() or kept.sum() < 0.5 * before.differs.sum():
        return False
    old, new = np.abs(before.d[kept]), np.abs(after.d[kept])
    elsewhere = np.abs(after.d[after.compared])
    if not new.any() and not elsewhere.any():
        return True
    mean_old, mean_new = np.abs(before.d[before.compared]).mean(), elsewhere.mean()
    if not np.isfinite(mean_new):
        return False
    return bool(mean_new * EXPLAINED <= mean_old and (new < old).mean() >= IMPROVED)


def statistics(found: Difference, a: Trace) -> dict[str, Any]:
    """Raw statistics of d, JSON-ready: `count`, `different`, `missing`, `mean`, `signed`, `max`, `p999`, `infinite`,
    `k3` (estimator of KL of A from B, with A as the rollout: mean of exp(d) - 1 - d), `worst_sequence`."""
    d = found.d[found.compared]
    finite = d[np.isfinite(d)]
    size = np.abs(finite)
    means = []
    for x, y in zip(found.a, found.b):
        with np.errstate(invalid="ignore"):
            gap = np.abs(y.astype(np.float64) - x)
        gap = gap[np.isfinite(gap)]
        means.append(float(gap.mean()) if len(gap) else 0.0)
    worst = int(np.argmax(means)) if means else 0
    with np.errstate(over="ignore"):
        k3 = float((np.exp(finite) - 1.0 - finite).mean()) if len(finite) else 0.0
    return {
        "count": int(found.compared.sum()),
        "different": int(found.differs.sum()),
        "missing": found.num_missing,
        "infinite": int(len(d) - len(finite)),
        "mean": float(size.mean()) if len(size) else 0.0,
        "signed": float(finite.mean()) if len(finite) else 0.0,
        "max": float(size.max()) if len(size) else 0.0,
        "p999": float(np.quantile(size, 0.999)) if len(size) else 0.0,
        "k3": k3 if np.isfinite(k3) else None,
        "worst_sequence": {"sequence": worst, "mean": means[worst] if means else 0.0},
        "sequences": len(a.sequences),
        "histogram": _histogram(size),
    }


def _histogram(size: np.ndarray) -> list[list[float]]:
    """[exponent, tokens] by powers of two of |d|, zeros apart as exponent -200."""
    exponents = np.where(size > 0, np.floor(np.log2(np.maximum(size, 2.0**-199))), -200).astype(int)
    return [[int(e), int((exponents == e).sum())] for e in np.unique(exponents)]


def worst_tokens(found: Difference, a: Trace, count: int = WORST) -> list[dict[str, Any]]:
    """The tokens with the largest |d|, largest first: `sequence`, `position`, `id`, `a`, `b`, `d`."""
    size = np.abs(found.d)
    size[~found.differs] = -1.0
    order = np.argsort(-size, kind="stable")[:count]
    places = [(i, j) for i, x in enumerate(found.a) for j in range(len(x))]
    flat_a, flat_b = found.flat_a, found.flat_b
    return [
        {
            "sequence": places[row][0],
            "position": places[row][1],
            "id": int(a.sequences[places[row][0]].ids[places[row][1]]),
            "a": float(flat_a[row]),
            "b": float(flat_b[row]),
            "d": float(found.d[row]),
        }
        for row in order
        if size[row] >= 0
    ]


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def unequal(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """bool [R, N]: elements that differ. Rows that one side did not record (NaN throughout) never do; tensors of two
    dtypes are compared by value."""
    if x.dtype != y.dtype:
        x, y = x.double(), y.double()
    integer = _INTEGERS[x.element_size()]
    found = x.contiguous().view(integer) != y.contiguous().view(integer)
    if x.is_floating_point():
        found &= ~((x == 0) & (y == 0))
        found &= ~(x.isnan() & y.isnan())
        found &= ~(x.isnan().all(1) | y.isnan().all(1))[:, None]
    return found


def recorded_rows(x: torch.Tensor) -> torch.Tensor:
    """bool [R]: rows that hold a number."""
    return ~x.isnan().all(1) if x.is_floating_point() else torch.ones(len(x), dtype=torch.bool)
