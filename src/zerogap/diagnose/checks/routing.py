"""Check 10: where experts were recorded, both sides sent each token to the same ones.

A token that goes to other experts is a consequence where the numbers before the router differ already: its margin is
then small, and the tie is decided by what came before (`near_tie`). With equal scores and another choice it is the
router's own rule. A near tie accounts for the logdiff where the flipped tokens hold most of it and nothing before them
is known to differ by itself.
"""

import numpy as np

from zerogap.diagnose.facts import Facts
from zerogap.diagnose.side import Side
from zerogap.diagnose.trace import SequenceTrace
from zerogap.diagnose.verdict import Cause, Finding

NEEDS = "record the experts of every token and layer, and their margins, on both sides"
MOST = 0.5  # of the sum of |d|


def flips(x: SequenceTrace, y: SequenceTrace) -> np.ndarray | None:
    """bool [N, L]: tokens and layers with other experts, in whatever order they are listed; None if not recorded."""
    if x.experts is None or y.experts is None or x.experts.shape[1:] != y.experts.shape[1:]:
        return None
    count = min(len(x.experts), len(y.experts))
    one, other = np.sort(x.experts[:count], -1), np.sort(y.experts[:count], -1)
    known = (one >= 0).all(-1) & (other >= 0).all(-1)
    return np.asarray((one != other).any(-1) & known)


def check(a: Side, b: Side, facts: Facts) -> Finding:
    """See the module."""
    pairs = list(zip(a.trace.sequences, b.trace.sequences))
    found = [flips(x, y) for x, y in pairs]
    if not any(f is not None for f in found):
        if not any(s.experts is not None for t in (a.trace, b.trace) for s in t.sequences):
            return Finding("routing", "not checked", "no experts were recorded", needs=_needs(a, b))
        return Finding("routing", "not checked", "experts were recorded on one side only", needs=NEEDS)
    tokens = sum(len(f) for f in found if f is not None)
    flipped = sum(int(f.any(1).sum()) for f in found if f is not None)
    if not flipped:
        return Finding("routing", "passed", f"{tokens} tokens went to the same experts on both sides")
    margins = _margins(pairs, found)
    held = _held(found, facts)
    ties = [m for m in margins if m[0] == 0.0 and m[1] == 0.0]
    text = f"{flipped} of {tokens} tokens went to other experts in some layer, with {held:.0%} of the sum of |d|"
    if margins:
        middle = [np.median([m[i] for m in margins]) for i in (0, 1)]
        text += f"; margins there {middle[0]:.3g} (A) and {middle[1]:.3g} (B)"
    evidence = {"tokens": flipped, "of": tokens, "share": held, "margins": margins[:50]}
    if margins and len(ties) == len(margins):
        causes = (Cause("router", "tie_rule", "equal scores, other experts: ties are broken by another rule"),)
        return Finding("routing", "failed", text, causes, evidence={**evidence, "accounts": held >= MOST})
    causes = (Cause("routing", "near_tie", text),)
    seen = facts.walk().first is not None
    accounts = False if seen or held < MOST else None  # what stands before the router parts the sides
    return Finding("routing", "failed", text, causes, evidence={**evidence, "accounts": accounts})


def _needs(a: Side, b: Side) -> str:
    """Nothing for a model without experts."""
    keys = ("num_experts", "n_routed_experts", "num_local_experts")
    return NEEDS if any(t.model.get(k) for t in (a.trace, b.trace) for k in keys) else ""


def _margins(
    pairs: list[tuple[SequenceTrace, SequenceTrace]], found: list[np.ndarray | None]
) -> list[tuple[float, float]]:
    out = []
    for (x, y), flipped in zip(pairs, found):
        if flipped is None or x.margins is None or y.margins is None:
            continue
        for token in np.flatnonzero(np.any(flipped, axis=1)):
            layer = int(np.flatnonzero(flipped[token])[0])  # later ones follow from it
            out.append((float(x.margins[token, layer]), float(y.margins[token, layer])))
    return out


def _held(found: list[np.ndarray | None], facts: Facts) -> float:
    """Share of the sum of |d| on tokens that a flipped row scores (the row before the token)."""
    difference = facts.difference
    size = np.abs(np.nan_to_num(difference.d, posinf=0.0, neginf=0.0))
    total, place, held = float(size.sum()), 0, 0.0
    for x, flipped in zip(difference.a, found):
        if flipped is not None:
            rows = np.zeros(len(x), bool)
            count = min(len(x) - 1, len(flipped))
            rows[1 : count + 1] = np.any(flipped, axis=1)[:count]
            held += float(size[place : place + len(x)][rows].sum())
        place += len(x)
    return held / total if total else 0.0
