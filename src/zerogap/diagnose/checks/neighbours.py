"""Check 6: a token's log-prob does not depend on what else is in the batch.

Live sides are searched with a fixed seed: every sequence alone against company of other contents, lengths, numbers
and places; a large model that computes on CPU is searched less, for every trial is a pass. The kind of company that
changes a bit names the field. It accounts for the logdiff if the sides agree
once their company is the same, or each sequence is alone; then the operator that sees the neighbours is looked for
between the side's own two passes.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from zerogap.diagnose.compare import explains
from zerogap.diagnose.facts import Facts
from zerogap.diagnose.replay import within_side
from zerogap.diagnose.side import Ask, Side
from zerogap.diagnose.trace import Pass, Trace
from zerogap.diagnose.verdict import Cause, Finding

NEEDS = "give a live side, or record the same sequences once alone and once in other company"
SEED = 6
SEARCHED = 4  # sequences that are put into other company; half as many where every token is a pass
ROUNDS = 3  # of every kind of company
LARGE = 1 << 25  # weights in the layers, roughly, from which on a CPU makes one round, that of contents with `FEW`
FEW = 2


@dataclasses.dataclass(frozen=True)
class Trial:
    """One kind of company. `field`: what it shows if it changes a bit that the kinds before it do not."""

    field: str
    ask: Ask
    against: Ask


def check(a: Side, b: Side, facts: Facts) -> Finding:
    """See the module."""
    difference = facts.difference
    if difference.same and not facts.thorough:
        return Finding("neighbours", "not checked", "nothing differs", needs="")
    searched, found = [], []
    for which in ("a", "b"):
        if not facts.live(which):
            continue
        facts.progress(f"neighbours of side {which.upper()}")
        trials = 0
        for trial in _trials(which, facts):
            one, other = facts.again(which, trial.against), facts.again(which, trial.ask)
            if one is None or other is None:
                continue
            trials += 1
            facts.progress(f"neighbours of side {which.upper()}: batch {trials}")
            if facts.within(which, one, other).differs.any():
                found.append((which, trial))
                break
        if trials:
            searched.append(f"side {which.upper()}, {trials} batches")
    if not found:
        recorded = _recorded(facts)
        if recorded is not None:
            return recorded
        if not searched and all(_alone(facts.answers[which]) for which in ("a", "b")):
            text = "no company exists: both sides computed each sequence alone"
            return Finding("neighbours", "not checked", text, needs="")
        if not searched:
            return Finding("neighbours", "not checked", "no side could be asked for other batches", needs=NEEDS)
        return Finding("neighbours", "passed", f"no company changes a bit ({'; '.join(searched)})")
    return _failed(found, facts)


def _alone(answer: Pass) -> bool:
    """True if every batch is known to hold one sequence."""
    return answer.batches is not None and all(len(batch) == 1 for batch in answer.batches)


def _trials(which: str, facts: Facts) -> Iterator[Trial]:
    """Company, the most specific kinds first."""
    trace = facts.side(which).trace
    path, definition = facts.answers[which].path, facts.answers[which].definition
    chosen = _searched(facts, SEARCHED if path == "whole" else SEARCHED // 2)
    slow = _slow(trace) and not facts.thorough
    rounds = 1 if slow else ROUNDS
    few = tuple((i,) for i in _searched(facts, FEW)) if slow else None
    lengths = [len(trace.sequences[i].ids) for i in chosen]
    highest = max(int(s.ids.max()) for s in trace.sequences) + 1
    generator = np.random.default_rng(SEED)

    def ask(neighbours: tuple[list[int], ...] = (), batches: tuple[tuple[int, ...], ...] | None = None) -> Ask:
        each = batches or tuple((i,) for i in chosen)
        return Ask(path, each, neighbours, definition=definition)

    def strangers(count: int, length: int) -> tuple[list[int], ...]:
        return tuple(generator.integers(0, highest, max(2, length)).tolist() for _ in range(count))

    shortest, longest = min(lengths), max(lengths)
    for _ in range(rounds):
        count = int(generator.integers(1, 4))
        for length in (shortest, longest + 3):
            yield Trial("content", ask(strangers(count, length), few), ask(strangers(count, length), few))
    order = tuple(chosen)
    if len(order) > 1:
        yield Trial("row", ask(batches=(order,)), ask(batches=(order[::-1],)))
        yield Trial("row", ask(batches=(order,)), ask(batches=((*order[1:], order[0]),)))
    for _ in range(rounds):
        yield Trial("batch_size", ask(strangers(1, shortest)), ask())
        yield Trial("batch_size", ask(strangers(int(generator.integers(2, 6)), shortest)), ask())
    yield Trial("padding", ask(strangers(1, longest + 5)), ask())
    yield Trial("padding", ask(strangers(2, longest + 17)), ask())
    if len(order) > 1:
        yield Trial("batch_size", ask(batches=(order,)), ask())


def _slow(trace: Trace) -> bool:
    """True for a large model on CPU, as far as the trace says."""
    layers, width = (trace.model.get(name) for name in ("num_hidden_layers", "hidden_size"))
    if not (isinstance(layers, int) and isinstance(width, int)):
        return False
    return str(trace.layout.get("device", "cpu")).startswith("cpu") and 12 * layers * width * width >= LARGE


def _searched(facts: Facts, count: int) -> list[int]:
    """At most `count` sequences: the shortest, the longest, and those that differ most."""
    sequences = facts.a.trace.sequences
    by_length = sorted(range(len(sequences)), key=lambda i: len(sequences[i].ids))
    difference = facts.difference
    gaps = [np.nansum(np.abs(y.astype(np.float64) - x)) for x, y in zip(difference.a, difference.b)]
    by_gap = sorted(range(len(gaps)), key=lambda i: -gaps[i])
    return sorted(list(dict.fromkeys([by_length[0], by_length[-1], *by_gap, *by_length]))[:count])


def _recorded(facts: Facts) -> Finding | None:
    """Recorded passes of one side in unlike batches."""
    for which in ("a", "b"):
        answer = facts.answers[which]
        for other in facts.side(which).trace.passes[1:]:
            if other.path != answer.path or other.definition != answer.definition or other.batches == answer.batches:
                continue
            between = facts.within(which, answer, other)
            if between.differs.any():
                after = facts.between(other if which == "a" else None, other if which == "b" else None)
                accounts = explains(facts.difference, after)
                named, where = within_side(which, other, answer, facts)
                text = f"side {which.upper()} recorded other log-probs in other batches: mean |d| {between.mean:.3g}"
                causes = (*named, Cause("neighbours", "batch_size", text + where))
                return Finding("neighbours", "failed", text + where, causes, evidence={"accounts": accounts})
    return None


def _failed(found: list[tuple[str, Trial]], facts: Facts) -> Finding:
    before = facts.difference
    which, trial = found[0]
    accounts: bool | None = False
    used: Pass | None = None
    for candidate, kind in found:
        for mine, theirs in _alike(candidate, facts):
            after = facts.between(*((mine, theirs) if candidate == "a" else (theirs, mine)))
            if explains(before, after):
                which, trial, accounts, used = candidate, kind, True, mine
                for side, aligned in ((candidate, mine), ("b" if candidate == "a" else "a", theirs)):
                    if aligned is not None:
                        facts.aligned[side] = aligned
                facts.substituted.setdefault("state", after)
                break
        if accounts:
            break
    if not accounts and (same := _same_operator(found, facts)) is not None:
        which, trial = same
        accounts = None
    named: tuple[Cause, ...] = ()
    where = ""
    if accounts and used is not None:
        named, where = within_side(which, used, facts.answers[which], facts)
    words = {
        "content": "with what its neighbours hold",
        "row": "with the order of the batch",
        "batch_size": "with the number of neighbours",
        "padding": "with the padding of its batch",
    }
    text = f"side {which.upper()}'s log-probs change {words[trial.field]}{where}"
    causes = (*named, Cause("neighbours", trial.field, text))
    evidence = {"accounts": accounts, "sides": [w for w, _ in found], "before": before.mean}
    return Finding("neighbours", "failed", text, causes, evidence=evidence)


def _same_operator(found: list[tuple[str, Trial]], facts: Facts) -> tuple[str, Trial] | None:
    """A side whose rows change with what its neighbours hold in the very operator that parts the two sides."""
    first = facts.walk().first
    for which, trial in found:
        if first is None or trial.field != "content":
            continue
        passes = [facts.again(which, dataclasses.replace(ask, capture=True)) for ask in (trial.against, trial.ask)]
        if passes[0] is None or passes[1] is None:
            continue
        own = facts.walk(passes[0], passes[1], which).first
        if own is not None and own.node == first.node:
            return which, trial
    return None


def _alike(which: str, facts: Facts) -> Iterator[tuple[Pass | None, Pass | None]]:
    """(the side's pass, the other's or None for its answer) with the same company."""
    other = "b" if which == "a" else "a"
    mine, theirs = facts.answers[which], facts.answers[other]
    alone = tuple((i,) for i in range(len(facts.side(which).trace.sequences)))
    if theirs.batches is not None and theirs.batches != mine.batches:
        found = facts.again(
            which, Ask(mine.path, theirs.batches, definition=mine.definition, capture=bool(mine.boundaries))
        )
        if found is not None:
            yield found, None
    if mine.batches != alone:
        found = facts.again(which, Ask(mine.path, alone, definition=mine.definition, capture=bool(mine.boundaries)))
        if found is not None:
            yield found, None
            if facts.live(other):
                yield found, facts.again(other, Ask(theirs.path, alone, definition=theirs.definition))
