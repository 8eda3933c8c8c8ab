"""Relations between two arrays of log-probs that need nothing else: shift by one, units, the end of a sequence."""

import dataclasses
import math
from collections.abc import Callable, Iterator

import numpy as np

from zerogap.diagnose.compare import EXPLAINED, Arrays, Difference
from zerogap.diagnose.facts import Facts
from zerogap.diagnose.trace import SequenceTrace, Trace

FEWEST = 8  # tokens from which on a relation between arrays is more than chance
FEWEST_OF_PART = 3
_CLOSE = 0.02  # absolute size of |d| that is no end-of-sequence effect


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """A field of `definition`, what is claimed, and the difference that is left if it is true.

    `accounts`: None where that is to be judged by what is left; a value where the relation itself was the test.
    """

    field: str
    text: str
    after: Difference
    accounts: bool | None = None


def shifts(before: Difference, facts: Facts) -> Iterator[Hypothesis]:
    """One side's entry i is the other's entry i + 1."""
    if before.compared.sum() < FEWEST:
        return
    full_a = tuple(x.astype(np.float32) for x in facts.answers["a"].logprobs)
    full_b = tuple(x.astype(np.float32) for x in facts.answers["b"].logprobs)
    for step, text in ((1, "B's entry i belongs to token i + 1"), (-1, "A's entry i belongs to token i + 1")):
        moved = _moved(full_b if step == 1 else full_a, 1, before.a if step == 1 else before.b)
        other = before.a if step == 1 else before.b
        left = tuple(np.where(np.isnan(m), np.float32(np.nan), o) for m, o in zip(moved, other))
        pair = (left, moved) if step == 1 else (moved, left)
        yield Hypothesis(
            "shift", f"the log-probs are shifted by one: {text}", dataclasses.replace(before, a=pair[0], b=pair[1])
        )


def partial_shifts(before: Difference, facts: Facts) -> Iterator[Hypothesis]:
    """One side's entry i is the other's entry i + 1 in some parts of the tokens only: sequences after the first of a
    row, packed samples whose positions start again, turns after the first one."""
    borders = [_borders(s, len(x)) for s, x in zip(facts.a.trace.sequences, before.a)]
    for which, text in (("b", "B's entry i belongs to token i + 1"), ("a", "A's entry i belongs to token i + 1")):
        own, other = (before.b, before.a) if which == "b" else (before.a, before.b)
        full = tuple(x.astype(np.float32) for x in facts.answers[which].logprobs)
        made, left = [x.copy() for x in own], [x.copy() for x in other]
        hit = total = tokens = 0
        for i, moved in enumerate(_moved(full, 1, other)):
            for begin, end in borders[i]:
                total += bool((~np.isnan(own[i][begin:end])).any())
                part = moved[begin:end].copy()
                part[:1] = np.nan  # its number stands in another part
                shared = ~np.isnan(part) & ~np.isnan(own[i][begin:end])
                now, then = (np.abs(x[shared] - other[i][begin:end][shared]) for x in (part, own[i][begin:end]))
                if shared.sum() < FEWEST_OF_PART or not then.mean() > EXPLAINED * now.mean():
                    continue
                hit, tokens = hit + 1, tokens + int(shared.sum())
                made[i][begin:end], left[i][begin:end] = part, np.where(np.isnan(part), np.nan, left[i][begin:end])
        if tokens >= FEWEST:
            after = before.with_arrays(**{which: tuple(made), "a" if which == "b" else "b": tuple(left)})
            words = f"the log-probs of {hit} of {total} parts are shifted by one: {text}"
            yield Hypothesis("shift", words, after, True if after.mean * EXPLAINED <= before.mean else None)


def _borders(sequence: SequenceTrace, count: int) -> list[tuple[int, int]]:
    """Parts of a sequence: each begins where positions start again, or where tokens begin to count."""
    begins = {0}
    if sequence.positions is not None:
        begins |= set((np.flatnonzero(np.diff(sequence.positions[:count]) < 0) + 1).tolist())
    counted = np.asarray(sequence.counted[:count], bool)
    begins |= set((np.flatnonzero(counted[1:] & ~counted[:-1]) + 1).tolist())
    places = sorted(b for b in begins if b < count)
    return list(zip(places, [*places[1:], count]))


def _moved(values: Arrays, step: int, like: Arrays) -> Arrays:
    """Entry i of the result is entry i - step of `values`, NaN where `like` has none."""
    out = []
    for x, keep in zip(values, like):
        y = np.full(len(keep), np.nan, np.float32)
        count = min(len(keep), len(x) + step)
        y[step:count] = x[: count - step]
        out.append(np.where(np.isnan(keep), np.float32(np.nan), y))
    return tuple(out)


def units(before: Difference) -> Iterator[Hypothesis]:
    """One side records another function of the natural log-prob."""
    if before.compared.sum() < 2:
        return
    forms: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "the negative log-prob": lambda x: -x,
        "the log-prob to base 2": lambda x: x / math.log(2.0),
        "the log-prob to base 10": lambda x: x / math.log(10.0),
        "the probability": np.exp,
        "the negative log-prob to base 2": lambda x: -x / math.log(2.0),
        "the negative log-prob to base 10": lambda x: -x / math.log(10.0),
        "the perplexity": lambda x: np.exp(-x),
    }
    for name, form in forms.items():
        for side in ("B", "A"):
            source, target = (before.a, before.b) if side == "B" else (before.b, before.a)
            with np.errstate(over="ignore"):
                made = tuple(form(x.astype(np.float64)).astype(np.float32) for x in source)
            made = tuple(_rounding_aside(m, t) for m, t in zip(made, target))
            after = before.with_arrays(a=made) if side == "B" else before.with_arrays(b=made)
            yield Hypothesis("unit", f"{side} records {name}", after)


def _rounding_aside(made: np.ndarray, target: np.ndarray) -> np.ndarray:
    """`made`, with the target's bits where both agree to the rounding that a conversion in FP32 makes."""
    with np.errstate(invalid="ignore"):
        close = np.abs(made.astype(np.float64) - target) <= 4 * np.spacing(np.abs(target).astype(np.float32) + 1e-30)
    return np.where(close, target, made)


def last_token(before: Difference, a: Trace, b: Trace) -> Iterator[Hypothesis]:
    """Only the last token of sequences differs, or has no log-prob on one side: the end-of-sequence id is handled
    otherwise."""
    lasts = [_last(x, ma, mb) for x, ma, mb in zip(before.a, before.missing_a, before.missing_b)]
    known = [at for at in lasts if at is not None]
    if not known:
        return
    ended = [
        "length" not in (s.finish_reason, t.finish_reason) and at is not None
        for s, t, at in zip(a.sequences, b.sequences, lasts)
    ]
    outside = dataclasses.replace(before, a=_without(before.a, lasts), b=_without(before.b, lasts))
    missing = [
        at is not None and bool(ma[at] | mb[at]) for ma, mb, at in zip(before.missing_a, before.missing_b, lasts)
    ]
    other_missing = before.num_missing - sum(missing)
    gaps = [_gap(x, y, at) for x, y, at in zip(before.a, before.b, lasts)]
    hit = [m or (g is not None and g > max(_CLOSE, 20 * outside.mean)) for m, g in zip(missing, gaps)]
    if not any(hit) or other_missing or sum(h and e for h, e in zip(hit, ended)) < 0.8 * sum(ended):
        return
    if sum(hit) < 2 and sum(len(x) for x in before.a) < FEWEST:
        return
    text = "only the last token of a sequence differs" if not any(missing) else "the last token has no log-prob"
    where = f" on side {'A' if any(m[-1] for m in before.missing_a if len(m)) else 'B'}" if any(missing) else ""
    text = f"{text}{where}, in {sum(hit)} of {len(hit)} sequences: the end is handled otherwise"
    yield Hypothesis("eos", text, outside, outside.mean * EXPLAINED <= before.mean or not outside.differs.any())


def _last(values: np.ndarray, missing_a: np.ndarray, missing_b: np.ndarray) -> int | None:
    """Last token that any side has a number for."""
    known = np.flatnonzero(~np.isnan(values) | missing_a | missing_b)
    return int(known[-1]) if len(known) else None


def _without(values: Arrays, lasts: list[int | None]) -> Arrays:
    out = []
    for x, at in zip(values, lasts):
        y = x.copy()
        if at is not None:
            y[at] = np.nan
        out.append(y)
    return tuple(out)


def _gap(x: np.ndarray, y: np.ndarray, at: int | None) -> float | None:
    if at is None or np.isnan(x[at]) or np.isnan(y[at]):
        return None
    with np.errstate(invalid="ignore"):
        return float(abs(float(y[at]) - float(x[at])))
