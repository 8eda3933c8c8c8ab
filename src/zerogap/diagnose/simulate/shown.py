"""Numbers that recorded rows themselves show: a factor, a cap, an angle. They are guesses, and only ever proposed.

A form with one free number cannot be found by a list of usual ones. Each function here reads an operator's inputs and
outputs and says what the number would have to be; `near` gives the simplest numbers around it. A form with such a
number is named, as any other, only if it reproduces the bits.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import torch

MOST = 6  # numbers of one grid, or of one form, that are worth a trial


def _yarn(n: float) -> float:
    """YaRN's attention factor for contexts that are n times as long."""
    return 0.1 * math.log(n) + 1


def _of_yarn(value: float) -> float:
    return math.exp(min(10 * (value - 1), 20.0)) if value > 1.01 else 0.0


_FORMS: tuple[tuple[Callable[[float], float], Callable[[float], float]], ...] = (
    (lambda v: 1 / v, lambda n: 1 / n),
    (lambda v: v**2, math.sqrt),
    (lambda v: v**-2, lambda n: n**-0.5),
    (lambda v: (1.4 / v) ** 2, lambda n: 1.4 * n**-0.5),
    (_of_yarn, _yarn),
    (lambda v: _of_yarn(math.sqrt(v)), lambda n: _yarn(n) ** 2),
)


def near(value: float, relative: float, count: int = 12) -> list[float]:
    """Numbers within `relative` of a value, the simplest first: multiples of 1, 0.5 and 0.25 times powers of ten, then
    1/n, sqrt(n), 1/sqrt(n), 1.4/sqrt(n) (MiniCPM), 0.1 log(n) + 1 and its square (YaRN) of whole n; the value last."""
    if not math.isfinite(value) or value == 0.0:
        return []
    found: dict[float, None] = {}
    sign, size = math.copysign(1.0, value), abs(value)
    top = math.floor(math.log10(size))
    for digits in range(7):
        for step in (1.0, 0.5, 0.25):
            grid = step * 10.0 ** (top - digits)
            low, high = math.ceil(size * (1 - relative) / grid), math.floor(size * (1 + relative) / grid)
            if high - low < MOST:
                found |= {sign * float(f"{n * grid:.9g}"): None for n in _closest(low, high, size / grid)}
    for inverse, form in _FORMS:
        ends = sorted((inverse(size * (1 - relative)), inverse(size * (1 + relative))))
        low, high = max(1, math.ceil(ends[0] - 1e-6)), min(8192, math.floor(ends[1] + 1e-6))
        found |= {
            sign * form(n): None for n in _closest(low, high, inverse(size)) if abs(form(n) / size - 1) <= relative
        }
    return [*list(found)[:count], value]


def _closest(low: int, high: int, wanted: float) -> list[int]:
    return sorted(range(max(low, 1), high + 1), key=lambda n: abs(n - wanted))[:MOST]


def name(value: float) -> str:
    """As it stands in a variant: nine digits say an FP32 number exactly."""
    return f"{value:.9g}"


# ---------------------------------------------------------------------------------------------------- one number


def factor(given: torch.Tensor, out: torch.Tensor, noise: float = 0.03) -> float | None:
    """F of out = F x given, up to `noise` of its size; None where it is 1 or none fits."""
    x, y = given.double().flatten(), out.double().flatten()
    known = x.isfinite() & y.isfinite()
    x, y = x[known], y[known]
    square = float((x * x).sum())
    if not square:
        return None
    found = float((x * y).sum()) / square
    left = float((y - found * x).square().sum())
    if found == 0.0 or left > noise**2 * float(y.square().sum()) or abs(found - 1) < 2e-4:
        return None
    return found


def cap(given: torch.Tensor, out: torch.Tensor) -> float | None:
    """C of out = C tanh(given / C), from the elements that it bends; None where none fits."""
    x, y = given.double().flatten(), out.double().flatten()
    ratio = y / x
    bent = (ratio > 0.2) & (ratio < 0.97) & (x.abs() > 0.2 * x.abs().amax())
    if int(bent.sum()) < 4:
        return None
    bent &= ratio <= torch.quantile(ratio[bent][:100_000], max(0.25, min(1.0, 16 / int(bent.sum()))))  # say it best
    u = torch.linspace(0.01, 6.0, 6000, dtype=torch.float64)
    places = torch.searchsorted(-(torch.tanh(u) / u), -ratio[bent]).clamp_max(len(u) - 1)
    return _agreed(x[bent].abs() / u[places], 0.05)


def _agreed(values: torch.Tensor, spread: float) -> float | None:
    """The median, if half of the values are within `spread` of it."""
    values = values[values.isfinite()]
    if len(values) < 4:
        return None
    middle = float(values.median())
    apart = (values - middle).abs()
    return middle if middle != 0.0 and float(apart.median()) <= spread * abs(middle) else None


def sigmoid_slope(gate: torch.Tensor, activated: torch.Tensor) -> float | None:
    """A of activated = gate x sigmoid(A x gate); None where none fits."""
    g, share = gate.double().flatten(), (activated.double() / gate.double()).flatten()
    usable = (share > 0.05) & (share < 0.95) & (g.abs() > 0.25)
    return _agreed(torch.log(share[usable] / (1 - share[usable])) / g[usable], 0.1)


def limit(values: torch.Tensor, effective: torch.Tensor) -> float | None:
    """L where effective = values clamped to -L .. L, from the values that it cuts; None where none fits."""
    v, e = values.double().abs().flatten(), effective.double().abs().flatten()
    cut = (e < 0.97 * v) & e.isfinite()
    if int(cut.sum()) < 2:
        return None
    middle = float(e[cut].median())
    return middle if float((e[cut] - middle).abs().median()) <= 0.02 * middle else None


def limit_inside(
    function: Callable[[torch.Tensor], torch.Tensor], given: torch.Tensor, out: torch.Tensor
) -> float | None:
    """L where out = function(given, but at most L), of a function that grows with what is above 0; None where none
    fits."""
    high = given > 0.25
    highest = limit(function(given[high]), out[high])
    if highest is None:
        return None
    grid = torch.linspace(0.01, 64.0, 64_000, dtype=torch.float64)
    place = int(torch.searchsorted(function(grid).contiguous(), torch.tensor(highest, dtype=torch.float64)))
    return float(grid[place]) if place < len(grid) else None


# ---------------------------------------------------------------------------------------------------- attention


@dataclasses.dataclass(frozen=True)
class Rows:
    """The beginning of one sequence, FP64: scaled scores [H, T, T], values [H, T, D], recorded outputs [H, T, D]."""

    scores: torch.Tensor
    values: torch.Tensor
    out: torch.Tensor

    def left(self, scores: torch.Tensor) -> float:
        """Squared distance of causal attention with other scores from what was recorded."""
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        p = torch.softmax(torch.where(seen, scores, -math.inf), -1)
        return float((p @ self.values - self.out).square().sum())


def attention_factor(parts: Sequence[Rows]) -> float | None:
    """F of scores times F; None where none fits better than 1."""
    found = _fitted(
        lambda f: sum(p.left(p.scores * f) for p in parts), 1 / 64, 64.0, sum(p.left(p.scores) for p in parts)
    )
    return None if found is None or abs(found - 1) < 2e-3 else found


def attention_cap(parts: Sequence[Rows]) -> float | None:
    """C of scores C tanh(s / C); None where none fits better than no cap."""
    plain = sum(p.left(p.scores) for p in parts)
    return _fitted(lambda c: sum(p.left(c * torch.tanh(p.scores / c)) for p in parts), 0.5, 256.0, plain)


def attention_sinks(parts: Sequence[Rows]) -> list[float]:
    """Score of one more key, without a value, of each head; none where the rows are not all shorter than without."""
    if not parts:
        return []
    of_rows = []
    for part in parts:
        seen = torch.ones(part.scores.shape[-2:], dtype=torch.bool).tril()
        scores = torch.where(seen, part.scores, -math.inf)
        plain = torch.softmax(scores, -1) @ part.values
        share = (part.out * plain).sum(-1) / plain.square().sum(-1)
        of_rows.append(torch.where(share < 1, torch.logsumexp(scores, -1) + torch.log(1 / share - 1), math.nan))
    found = torch.cat(of_rows, 1)
    found = torch.where(found.isfinite(), found, math.nan)
    middle = found.nanmedian(1).values
    apart = (found - middle[:, None]).abs().nanmedian(1).values
    missing = found.isnan().double().mean(1)
    return middle.tolist() if bool((apart < 0.2).all()) and bool((missing < 0.3).all()) else []


def _fitted(left: Callable[[float], float], low: float, high: float, plain: float) -> float | None:
    """The number from low to high that leaves least, by grids of ever smaller steps; None unless it leaves a fifth less
    than `plain`."""
    if not plain > 0.0:
        return None
    start, stop = math.log(low), math.log(high)
    for _ in range(5):
        grid = [start + (stop - start) * i / 16 for i in range(17)]
        losses = [left(math.exp(x)) for x in grid]
        best = min(range(17), key=lambda i: losses[i])
        start, stop = grid[max(0, best - 1)], grid[min(16, best + 1)]
    return math.exp(grid[best]) if losses[best] < 0.8 * plain else None


# ---------------------------------------------------------------------------------------------------- rotations


def phasors(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """complex128 [R, pairs]: how far each pair of [R, heads, pairs] complex rows was turned, summed over heads; its
    magnitude is the evidence."""
    return (before.conj() * after).sum(1)


def offsets(turned: torch.Tensor, positions: torch.Tensor, wave: torch.Tensor, reach: int) -> torch.Tensor:
    """int64 [R]: the whole number of steps, at most `reach` either way, that rows stand beyond their positions; a row
    that was not recorded stands as the one before it.

    turned complex [R, pairs]; positions [R]; wave [pairs] angles of one step.
    """
    steps = torch.arange(-reach, reach + 1, dtype=torch.float64)
    against = torch.polar(torch.ones(len(steps), len(wave), dtype=torch.float64), -steps[:, None] * wave)
    here = torch.polar(torch.ones(len(positions), len(wave), dtype=torch.float64), -positions[:, None].double() * wave)
    rows = (turned * here).split(64)
    found = torch.cat([(part @ against.T).real.argmax(1) for part in rows]) - reach
    for row in (~(turned.abs() > 0).any(1)).nonzero()[:, 0].tolist():
        found[row] = found[row - 1] if row else 0
    return found


def waves(turned: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """float64 [pairs]: angle of one step of each pair, from rows whose positions follow one another; NaN where none do.

    Steps of 1 give it without ambiguity, longer ones make it finer.
    """
    found = torch.full((turned.shape[1],), math.nan, dtype=torch.float64)
    for step in (1, 2, 4, 8, 16, 32, 64):
        follow = positions[step:] - positions[:-step] == step if len(positions) > step else torch.zeros(0)
        if not bool(follow.any()):
            break
        apart = (turned[:-step].conj() * turned[step:])[follow.bool()].sum(0)
        angle = torch.angle(apart) / step
        if step == 1:
            found = angle
        else:
            whole = 2 * math.pi / step
            found = angle + whole * ((found - angle) / whole).round()
    return found


def bases_of(wave: torch.Tensor, size: int) -> Iterator[float]:
    """theta of waves theta^(-2i / size), by the pairs that say it best."""
    exponents = torch.arange(0, size, 2, dtype=torch.float64) / size
    usable = (wave > 1e-4) & (exponents > 0.2)
    if int(usable.sum()) >= 2:
        thetas = wave[usable] ** (-1 / exponents[usable])
        middle = float(thetas.median())
        if math.isfinite(middle) and middle > 1.0:
            yield middle


def ratio(wave: torch.Tensor, usual: torch.Tensor) -> Iterator[float]:
    """F of wave = F x usual, the same for all pairs, where it is not 1 (positions that were scaled)."""
    usable = usual > 1e-3
    found = _agreed((wave / usual)[usable], 0.02)
    if found is not None and found > 0 and abs(found - 1) > 2e-3:
        yield found
