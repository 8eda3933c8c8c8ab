"""How much of mean |d| each part makes: definition, state, routing, numerics and their operators.

A part's share is what vanishes when it alone is substituted: 1 - mean|d substituted| / mean|d|, always with what was
put for what. Operators are substituted through `Ask.replace`: a live side computes all operators of a kind as the
other side does. What could not be substituted is `remaining`. Shares are no fractions of a whole: parts may cancel
each other.
"""

from collections.abc import Mapping

import numpy as np

from zerogap.diagnose.checks.routing import flips
from zerogap.diagnose.compare import Difference
from zerogap.diagnose.facts import Facts
from zerogap.diagnose.findings import OperatorShare, Share
from zerogap.diagnose.side import Ask, Replacement


def shares(facts: Facts, replacements: Mapping[str, Mapping[str, Replacement]]) -> tuple[Share, ...]:
    """The parts, in the order of the checks; empty where nothing differs.

    Args:
        replacements: as for `operator_shares`; all of them together make the numeric part.
    """
    whole = facts.difference
    mean = _finite_mean(whole)
    if mean == 0.0:
        return ()
    found = []
    words = {
        "definition": "both sides' log-probs under one definition",
        "state": "the same path, company and weight versions on both sides",
    }
    left = mean
    for part, text in words.items():
        if part in facts.substituted:
            after = _finite_mean(facts.substituted[part])
            found.append(Share(part, 1.0 - after / mean, text))
            left = min(left, after)
    routing = _routing(facts, whole)
    if routing is not None:
        found.append(Share("routing", routing, "tokens with other experts taken at the mean of all other tokens"))
    for which, kinds in replacements.items():
        rest = _replaced(which, kinds, facts)
        if rest is not None and "definition" not in facts.substituted:
            other = "B" if which == "a" else "A"
            text = f"all operators of {which.upper()} of these kinds computed as {other}'s: {', '.join(kinds)}"
            found.append(Share("numeric", 1.0 - rest / mean, text))
            left = min(left, rest)
    left_over = "what is left after the substitutions above" if found else "nothing could be substituted"
    found.append(Share("remaining", left / mean, left_over))
    return tuple(found)


def _finite_mean(difference: Difference) -> float:
    d = np.abs(difference.d[difference.compared])
    d = d[np.isfinite(d)]
    return float(d.mean()) if len(d) else 0.0


def _routing(facts: Facts, difference: Difference) -> float | None:
    """Share that flipped tokens have beyond the mean of the others; None where experts were not recorded."""
    rows: list[np.ndarray] = []
    known = False
    for x, y, values in zip(facts.a.trace.sequences, facts.b.trace.sequences, difference.a):
        flipped = flips(x, y)
        own = np.zeros(len(values), bool)
        if flipped is not None:
            known = True
            count = min(len(values) - 1, len(flipped))
            own[1 : count + 1] = np.any(flipped, axis=1)[:count]
        rows.append(own)
    if not known:
        return None
    flat = np.asarray(np.concatenate(rows) & difference.compared)
    others = np.asarray(difference.compared & ~flat)
    size = np.abs(np.nan_to_num(difference.d, posinf=0.0, neginf=0.0))
    if not flat.any() or not others.any():
        return 0.0
    after = np.where(flat, size[others].mean(), size)
    return float(1.0 - after[difference.compared].mean() / size[difference.compared].mean())


def operator_shares(facts: Facts, replacements: Mapping[str, Mapping[str, Replacement]]) -> tuple[OperatorShare, ...]:
    """Inside the numeric part; what makes most by itself first.

    Args:
        replacements: side (`a`, `b`) -> kind -> the other side's operator of that kind.
    """
    mean = _finite_mean(facts.difference)
    found: dict[str, OperatorShare] = {}
    if mean == 0.0:
        return ()
    for which, kinds in replacements.items():
        rest = _replaced(which, kinds, facts)
        for kind, operator in kinds.items():
            if kind in found or rest is None:
                continue
            facts.progress(f"share of {kind}")
            after = _replaced(which, {kind: operator}, facts)
            if after is None:
                continue
            others = _replaced(which, {k: o for k, o in kinds.items() if k != kind}, facts)
            found[kind] = OperatorShare(kind, 1.0 - after / mean, None if others is None else (others - rest) / mean)
    return tuple(sorted(found.values(), key=lambda s: -(s.share if s.alone is None else s.alone)))


def _replaced(which: str, kinds: Mapping[str, Replacement], facts: Facts) -> float | None:
    """Mean |d| with these operators of a side replaced; None if it cannot."""
    answer = facts.answers[which]
    ask = Ask(answer.path, answer.batches, definition=answer.definition, replace=kinds)
    key = which, tuple((kind, id(operator)) for kind, operator in sorted(kinds.items())), id(answer)
    if key not in facts.replaced:
        facts.replaced[key] = (kinds, answer), facts.again(which, ask)
    replaced = facts.replaced[key][1]
    if replaced is None:
        return None
    return _finite_mean(facts.between(*((replaced, None) if which == "a" else (None, replaced))))
