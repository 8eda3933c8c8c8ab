"""Check 4: keys and values come from the weights, prefix, positions and scales that the tokens belong to.

Decided on what the traces say of each token: weight version, position, length of the prefix hit, scale set. A fact that
differs accounts for the logdiff if the tokens without it agree, up to a twentieth of the others' difference; an older
version does not if the side recorded a whole pass with the same bits. A live side computes now from one set;
a recorded one has to say each token's version.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from zerogap.diagnose.compare import EXPLAINED, Difference
from zerogap.diagnose.facts import Facts
from zerogap.diagnose.side import Side
from zerogap.diagnose.trace import SequenceTrace, Trace
from zerogap.diagnose.verdict import Cause, Finding

NEEDS = "record the weight version of every token, its position, and how many tokens came from a prefix cache"


@dataclasses.dataclass(frozen=True)
class _Fact:
    """What is suspicious, and of which tokens (bool per sequence of the compared length).

    `certain`: never harmless, so that it accounts for the difference where all tokens have it; `own`: tokens that have
    it themselves, if the others only come after such ones.
    """

    field: str
    text: str
    tokens: tuple[np.ndarray, ...]
    certain: bool = True
    own: int = 0


def check(a: Side, b: Side, facts: Facts) -> Finding:
    """See the module."""
    one, other = a.trace, b.trace
    found = [f for make in (_versions, _positions, _scales) if (f := make(one, other)) is not None]
    if not found and (hits := _hits(one, other, facts)) is not None:
        found.append(hits)
    if not found:
        return _nothing_found(facts)
    difference = facts.difference
    tested = [(fact, _accounts(fact, difference)) for fact in found]
    if _recomputed(facts):
        tested = [(fact, False if fact.field == "stale_weights" else accounts) for fact, accounts in tested]
    tested.sort(key=lambda pair: pair[1] is not True)
    fact, accounts = tested[0]
    if difference.same:
        accounts = False
    causes = tuple(Cause("cache", f.field, f.text) for f, _ in tested)
    number = fact.own or int(sum(t.sum() for t in fact.tokens))
    evidence = {"accounts": accounts, "tokens": number, "facts": [f.text for f, _ in tested]}
    if accounts:
        facts.substituted["state"] = _elsewhere(fact, difference)
    return Finding("cache", "failed", f"{fact.text} ({number} tokens)", causes, evidence=evidence)


def _nothing_found(facts: Facts) -> Finding:
    """Passed only if of both sides it is known that one set of weights made all keys and values."""
    silent = []
    for name in ("a", "b"):
        if not facts.live(name) and any(s.versions is None for s in facts.side(name).trace.sequences):
            silent.append(name.upper())
    if silent:
        which = f"side {silent[0]} does" if len(silent) == 1 else "the sides do"
        text = f"{which} not say which weights made each token's keys and values"
        return Finding("cache", "not checked", text, needs=NEEDS)
    known = [n for n in ("positions", "hit_length") if all(_known(n, s.trace) for s in (facts.a, facts.b))]
    words = f", and the same {', '.join(known)}" if known else ""
    return Finding("cache", "passed", f"one version of the weights made all keys and values{words}")


def _recomputed(facts: Facts) -> bool:
    """True if each side with older tokens recorded a whole pass whose log-probs have the answer's bits."""
    older = []
    for which in ("a", "b"):
        trace, answer = facts.side(which).trace, facts.answers[which]
        values = [s.versions for s in trace.sequences if s.versions is not None and len(s.versions)]
        if not values or min(v.min() for v in values) == max(v.max() for v in values):
            continue
        others = [p for p in trace.passes[1:] if p.path == "whole" and p.definition == answer.definition]
        older.append(any(not facts.within(which, answer, p).differs.any() for p in others))
    return bool(older) and all(older)


def _known(name: str, trace: Trace) -> bool:
    return any(getattr(s, name) is not None for s in trace.sequences)


def _per_token(one: Trace, other: Trace, of: Callable[[SequenceTrace, SequenceTrace, int], np.ndarray | None]) -> tuple:
    out = []
    for x, y in zip(one.sequences, other.sequences):
        count = min(len(x.ids), len(y.ids))
        found = of(x, y, count)
        out.append(np.zeros(count, bool) if found is None else found[:count])
    return tuple(out)


def _any(tokens: tuple) -> bool:
    return any(t.any() for t in tokens)


def _versions(one: Trace, other: Trace) -> _Fact | None:
    """Tokens of an older weight version than the rest of their side, or of another than the other side's."""
    mixed = []
    for trace in (one, other):
        values = [s.versions for s in trace.sequences if s.versions is not None]
        newest = max((int(v.max()) for v in values if len(v)), default=0)
        mixed.append(newest)
    old = _per_token(one, other, lambda x, y, n: _older(x, n, mixed[0]) | _older(y, n, mixed[1]))
    stale = tuple(np.logical_or.accumulate(t) for t in old)  # what comes later has read their keys and values
    if _any(stale):
        text = "tokens were computed with keys and values, or weights, of an older version"
        return _Fact("stale_weights", text, stale, own=int(sum(t.sum() for t in old)))
    apart = _per_token(
        one,
        other,
        lambda x, y, n: None if x.versions is None or y.versions is None else x.versions[:n] != y.versions[:n],
    )
    if _any(apart):
        return _Fact("stale_weights", "the sides name unlike weight versions for the same tokens", apart, certain=False)
    return None


def _older(sequence: SequenceTrace, count: int, newest: int) -> np.ndarray:
    if sequence.versions is None:
        return np.zeros(count, bool)
    return np.asarray(sequence.versions[:count] < newest)


def _positions(one: Trace, other: Trace) -> _Fact | None:
    def of(x: SequenceTrace, y: SequenceTrace, n: int) -> np.ndarray | None:
        if x.positions is None and y.positions is None:
            return None
        at = np.arange(n)
        left = at if x.positions is None else x.positions[:n]
        right = at if y.positions is None else y.positions[:n]
        return np.asarray(left != right)

    apart = _per_token(one, other, of)
    return _Fact("positions", "the sides give the same tokens unlike positions", apart) if _any(apart) else None


def _scales(one: Trace, other: Trace) -> _Fact | None:
    def of(x: SequenceTrace, y: SequenceTrace, n: int) -> np.ndarray | None:
        return np.full(n, True) if x.scale_set and y.scale_set and x.scale_set != y.scale_set else None

    apart = _per_token(one, other, of)
    return _Fact("scales", "the sides' KV caches have unlike scale sets", apart) if _any(apart) else None


def _hits(one: Trace, other: Trace, facts: Facts) -> _Fact | None:
    """Sequences with a prefix hit differ, those without agree: what was found is not their prefix."""

    def of(x: SequenceTrace, y: SequenceTrace, n: int) -> np.ndarray | None:
        hit = max(x.hit_length or 0, y.hit_length or 0)
        return np.arange(n) >= hit if hit and (x.hit_length or 0) != (y.hit_length or 0) else None

    after = _per_token(one, other, of)
    if not _any(after) or all(t.any() for t in after):
        return None
    fact = _Fact("wrong_prefix", "only sequences with a prefix hit differ: what was found is not their prefix", after)
    return fact if _accounts(fact, facts.difference) else None


def _elsewhere(fact: _Fact, difference: Difference) -> Difference:
    """The tokens without the fact."""
    a = tuple(np.where(t, np.float32(np.nan), x) for t, x in zip(fact.tokens, difference.a))
    b = tuple(np.where(t, np.float32(np.nan), x) for t, x in zip(fact.tokens, difference.b))
    return dataclasses.replace(difference, a=a, b=b)


def _accounts(fact: _Fact, difference: Difference) -> bool | None:
    """True if the other tokens agree; None where all tokens have the fact; False where others differ as much."""
    if not difference.differs.any():
        return False
    rest = _elsewhere(fact, difference)
    if not rest.compared.any():
        return True if fact.certain else None
    inside = np.concatenate(fact.tokens) & difference.compared
    if not inside.any():
        return False
    mean = float(np.abs(difference.d[inside]).mean())
    return bool(rest.mean * EXPLAINED <= mean)
