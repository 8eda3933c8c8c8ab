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


def shares(facts: Facts) -> tuple[Share, ...]:
    """The parts, in the order of the checks; empty where nothing differs."""
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
    found.append(Share("remaining", left / mean, "nothing: what is left after the substitutions above"))
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
    """Inside the numeric part, largest first.

    Args:
        replacements: side (`a`, `b`) -> kind -> the other side's operator of that kind.
    """
    mean = _finite_mean(facts.difference)
    found: dict[str, float] = {}
    if mean == 0.0:
        return ()
    for which, kinds in replacements.items():
        answer = facts.answers[which]
        for kind, operator in kinds.items():
            if kind in found:
                continue
            facts.progress(f"share of {kind}")
            ask = Ask(answer.path, answer.batches, definition=answer.definition, replace={kind: operator})
            replaced = facts.again(which, ask)
            if replaced is None:
                continue
            pair = (replaced, None) if which == "a" else (None, replaced)
            found[kind] = 1.0 - _finite_mean(facts.between(*pair)) / mean
    return tuple(OperatorShare(k, s) for k, s in sorted(found.items(), key=lambda item: -item[1]))
