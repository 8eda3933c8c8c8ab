"""Definitions that recorded log-probs themselves show: the temperature, top-k, top-p or min-p under which they follow.

Only proposed: whether numbers follow from the logits under one is judged by scoring with it. Formulas: a filter that
keeps the mass m of the distribution adds -log m to the log-prob of a kept token.
"""

import math
from collections.abc import Iterator

import torch

from zerogap.diagnose.simulate.shown import near
from zerogap.diagnose.trace import Definition

LOW, HIGH = 0.05, 8.0  # temperatures
INFORMATIVE = 1e-3  # mass outside the kept set from which on a token says something


def temperature(logits: torch.Tensor, ids: torch.Tensor, recorded: torch.Tensor) -> float | None:
    """The temperature that comes closest, by ever finer grids; None where no token is finite.

    Args:
        logits: [N, V]; ids: int64 [N]; recorded: [N] log-probs.
    """
    known = recorded.isfinite()
    z, picked, wanted = logits[known].double(), ids[known, None], recorded[known].double()
    if not len(z):
        return None
    start, stop, best = math.log(LOW), math.log(HIGH), 0.0
    for _ in range(6):
        grid = [start + (stop - start) * i / 16 for i in range(17)]
        errors = []
        for x in grid:
            scored = (z / math.exp(x)).log_softmax(-1).gather(1, picked)[:, 0]
            errors.append(float((scored - wanted).abs().mean()))
        place = errors.index(min(errors))
        best, start, stop = grid[place], grid[max(0, place - 1)], grid[min(16, place + 1)]
    return math.exp(best)


def definitions(
    logits: torch.Tensor, ids: torch.Tensor, recorded: torch.Tensor, plain: Definition
) -> Iterator[Definition]:
    """Definitions: another temperature; or, at the temperature of `plain`, another top-k, top-p, min-p."""
    found = temperature(logits, ids, recorded)
    if found is not None:
        for value in near(found, 5e-4, 4):
            yield Definition(value, True, 0, 1.0, 0.0)
    given = plain.temperature or 1.0
    p = (logits.double() / given).softmax(-1)
    ordered = p.sort(-1, descending=True).values
    own = p.gather(1, ids[:, None])[:, 0]
    mass = own / recorded.double().exp()
    known = mass.isfinite() & (mass < 1 - INFORMATIVE) & (mass > 0)
    if int(known.sum()) < 4:
        return
    ordered, mass = ordered[known], mass[known, None]
    sums = ordered.cumsum(-1)
    last = (sums - mass).abs().argmin(-1, keepdim=True)  # of the kept ones
    following = (last + 1).clamp_max(ordered.shape[1] - 1)
    yield Definition(given, True, int(last.median()) + 1, 1.0, 0.0)
    before, upto = (sums - ordered).gather(1, last), sums.gather(1, last)
    if (top_p := _between(before, upto)) is not None:
        yield Definition(given, True, 0, top_p, 0.0)
    kept, dropped = (ordered.gather(1, place) / ordered[:, :1] for place in (last, following))
    if (min_p := _between(dropped, kept)) is not None:
        yield Definition(given, True, 0, 1.0, min_p)


def _between(low: torch.Tensor, high: torch.Tensor) -> float | None:
    """The simplest number above every `low` and at most every `high`; None where there is none."""
    bottom, top = float(low.max()), float(high.min())
    if not bottom < top:
        return None
    middle = (bottom + top) / 2
    return next((n for n in near(middle, (top - bottom) / (2 * middle)) if bottom < n < top), middle)
