"""Check 5: a side gives the same numbers again for the same ask.

First boundaries that two later captures contradict, though these agree with each other, were made while warming up:
they are set aside, and the later ones take their place. Log-probs are never set aside. A side whose later answers
differ again is not deterministic; that accounts for the logdiff if its runs differ among themselves as much as the
sides do.
"""

import dataclasses

from zerogap.diagnose.compare import Difference, explains, unequal
from zerogap.diagnose.facts import Facts
from zerogap.diagnose.side import Ask, Side
from zerogap.diagnose.trace import Pass
from zerogap.diagnose.verdict import Cause, Finding

NEEDS = "record a second pass of the same batch on each side, or give a live side"
COMPARABLE = 0.2  # of the sides' mean |d|


def check(a: Side, b: Side, facts: Facts) -> Finding:
    """See the module."""
    if facts.difference.same and not facts.thorough:
        return Finding("rerun", "not checked", "nothing differs", needs="")
    outcomes: dict[str, str] = {}
    worst: tuple[str, Difference] | None = None
    unrepeated: list[tuple[str, Pass, Difference]] = []
    for which in ("a", "b"):
        facts.progress(f"rerun of side {which.upper()}")
        answer, runs = facts.answers[which], _runs(which, facts)
        if not runs:
            continue
        first = facts.within(which, answer, runs[0])
        if _same(answer, runs[0], first):
            outcomes[which] = "same"
            continue
        if len(runs) > 1 and _same(runs[0], runs[1], facts.within(which, runs[0], runs[1])):
            if first.differs.any():
                unrepeated.append((which, runs[0], first))
                continue
            outcomes[which] = "warm-up"
            facts.notes.append(
                f"side {which.upper()}: its first boundaries differ from later ones that agree; set aside"
            )
            kept = {n: t for n, t in runs[0].boundaries.items() if n in answer.boundaries}
            facts.answers[which] = dataclasses.replace(answer, boundaries=kept)
            continue
        between = facts.within(which, runs[0], runs[1]) if len(runs) > 1 else first
        if between.same:  # only boundaries move; no log-prob does
            outcomes[which] = "same"
            continue
        outcomes[which] = "different"
        if worst is None or between.mean > worst[1].mean:
            worst = which, between
    if worst is None and unrepeated:
        return _unrepeated(unrepeated, facts)
    return _finding(outcomes, worst, facts)


def _unrepeated(found: list[tuple[str, Pass, Difference]], facts: Facts) -> Finding:
    """A record that its own side does not give again, though it repeats itself by now."""
    which, _, between = found[0]
    accounts: bool | None = False
    for side, again, _ in found:
        after = facts.between(again if side == "a" else None, again if side == "b" else None)
        if explains(facts.difference, after):
            which, accounts = side, None  # a later check may say why
    text = f"side {which.upper()}'s record is not what it computes now: mean |d| {between.mean:.3g}, twice the same"
    cause = Cause("rerun", "nondeterministic", text)
    return Finding("rerun", "failed", text, (cause,), evidence={"accounts": accounts, "rerun": between.mean})


def _finding(outcomes: dict[str, str], worst: tuple[str, Difference] | None, facts: Facts) -> Finding:
    if worst is not None:
        which, between = worst
        mean = facts.difference.mean
        text = f"side {which.upper()} does not repeat itself: mean |d| {between.mean:.3g} between two runs"
        accounts = between.mean >= COMPARABLE * mean
        evidence = {"accounts": accounts, "rerun": between.mean, "sides": mean}
        cause = Cause("rerun", "nondeterministic", text)
        return Finding("rerun", "failed", f"{text}, {mean:.3g} between the sides", (cause,), evidence=evidence)
    if not outcomes:
        return Finding("rerun", "not checked", "no side could be asked again", needs=NEEDS)
    words = ", ".join(f"side {w.upper()} {'repeats itself' if o == 'same' else o}" for w, o in outcomes.items())
    if len(outcomes) == 1:
        words += "; the other could not be asked"
    return Finding("rerun", "passed", words, evidence={"outcomes": outcomes})


def _runs(which: str, facts: Facts) -> list[Pass]:
    """Up to two further passes of the side's own answer."""
    answer = facts.answers[which]
    ask = Ask(answer.path, answer.batches, definition=answer.definition, capture=bool(answer.boundaries))
    if facts.live(which):
        first = facts.fresh(which, ask)
        second = None if first is None else facts.fresh(which, ask)
        return [p for p in (first, second) if p is not None]
    return [
        p
        for p in facts.side(which).trace.passes[1:]
        if (p.path, p.batches, p.definition) == (answer.path, answer.batches, answer.definition)
    ][:2]


def _same(one: Pass, other: Pass, found: Difference) -> bool:
    """The same log-probs and boundaries, as far as both have them."""
    if found.differs.any():
        return False
    shared = [n for n in one.boundaries if n in other.boundaries]
    return not any(
        one.boundaries[n].shape == other.boundaries[n].shape
        and bool(unequal(one.boundaries[n], other.boundaries[n]).any())
        for n in shared
    )
