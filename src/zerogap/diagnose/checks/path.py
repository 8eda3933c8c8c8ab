"""Check 7: how a token was computed (whole, decoded, in chunks, behind a prefix hit) does not change its log-prob.

Where the sides' answers come from unlike paths, a live side is asked for the other's path. If that removes the
difference, the path accounts for it, and the operator that differs between the side's own two passes is looked for.
"""

from collections.abc import Iterator

import numpy as np

from zerogap.diagnose.compare import explains
from zerogap.diagnose.facts import Facts
from zerogap.diagnose.replay import within_side
from zerogap.diagnose.side import Ask, Side
from zerogap.diagnose.trace import Pass
from zerogap.diagnose.verdict import Cause, Finding

RESCORED = 1e-5  # what FP32 rounding leaves of log-probs that were rescored from others
NEEDS = "give a live side, or record the same sequences under the other side's path as well"


def check(a: Side, b: Side, facts: Facts) -> Finding:
    """See the module."""
    paths = {which: facts.answers[which].path for which in ("a", "b")}
    difference = facts.difference
    if difference.same and not facts.thorough:
        return Finding("path", "not checked", "nothing differs", needs="")
    meant = facts.substituted.get("definition")
    if meant is not None and float(np.abs(meant.d[meant.compared]).max(initial=0.0)) < RESCORED:
        return Finding("path", "not checked", "nothing is left to explain under one definition", needs="")
    if paths["a"] == paths["b"]:
        return _consistent(facts, paths["a"])
    tried = []
    for which in ("a", "b"):
        facts.progress(f"path of side {which.upper()}")
        for mine in _alike(which, facts):
            tried.append(which)
            after = facts.between(mine if which == "a" else None, mine if which == "b" else None)
            if not facts.within(which, facts.answers[which], mine).differs.any():
                continue
            if explains(difference, after):
                facts.substituted.setdefault("state", after)
                facts.aligned[which] = mine
                return _failed(which, mine, after.mean, facts)
    if not tried:
        text = f"A computed by {paths['a']}, B by {paths['b']}, and neither could be asked for the other's"
        return Finding("path", "not checked", text, needs=NEEDS)
    text = f"A computed by {paths['a']}, B by {paths['b']}; the same path does not remove the difference"
    return Finding("path", "passed", text)


def _failed(which: str, mine: Pass, after: float, facts: Facts) -> Finding:
    answer = facts.answers[which]
    odd = answer.path if answer.path != "whole" else mine.path
    text = f"side {which.upper()} computes other numbers by {answer.path} than by {mine.path}"
    full = f"{text}: by the same path as the other side's, mean |d| {facts.difference.mean:.3g} becomes {after:.3g}"
    named, where = within_side(which, mine, answer, facts)
    causes = (*named, Cause("path", odd, text + where))
    evidence = {"accounts": True, "before": facts.difference.mean, "after": after}
    return Finding("path", "failed", full + where, causes, evidence=evidence)


def _alike(which: str, facts: Facts) -> Iterator[Pass]:
    """The side's passes under the other's path; and, where it is not whole itself, whole."""
    answer, other = facts.answers[which], facts.answers["b" if which == "a" else "a"]
    for batches in dict.fromkeys((answer.batches, other.batches)):
        ask = Ask(other.path, batches, definition=answer.definition, capture=bool(answer.boundaries))
        if (found := facts.again(which, ask)) is not None:
            yield found


def _others(which: str, facts: Facts) -> Iterator[Pass]:
    """The side's passes by further paths: those it recorded, and in a thorough diagnosis those it can be asked for."""
    answer = facts.answers[which]
    yield from (p for p in facts.side(which).trace.passes[1:] if p.definition == answer.definition)
    if facts.thorough and facts.live(which):
        for path in ("whole", "chunked", "decode", "prefix_hit"):
            capture = bool(answer.boundaries)
            found = facts.again(which, Ask(path, definition=answer.definition, capture=capture))
            if found is not None:
                yield found


def _consistent(facts: Facts, path: str) -> Finding:
    """Both sides computed alike; passes of further paths say whether a side agrees with itself."""
    compared = {path: None}
    for which in ("a", "b"):
        answer = facts.answers[which]
        for found in _others(which, facts):
            if found.path == answer.path:
                continue
            compared[found.path] = None
            between = facts.within(which, answer, found)
            if between.differs.any():
                after = facts.between(found if which == "a" else None, found if which == "b" else None)
                text = f"side {which.upper()} gives other log-probs by {found.path}: mean |d| {between.mean:.3g}"
                named, where = within_side(which, answer, found, facts)
                odd = found.path if found.path != "whole" else answer.path
                causes = (*named, Cause("path", odd, text + where))
                evidence = {"accounts": explains(facts.difference, after)}
                return Finding("path", "failed", text + where, causes, evidence=evidence)
    words = f", and give the same by {', '.join(list(compared)[1:])}" if len(compared) > 1 else ""
    return Finding("path", "passed", f"both sides computed by {path}{words}")
