"""A diagnosis from two sides to a report: what is cheap and common is ruled out first, numerics last.

All checks run. The first failed one whose causes account for the difference decides the verdict, one that names a
field before one that does not, and before those that could not be tested; what else was found is listed as further.
What does not account for it, or could not be tested, never silences a later check.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from zerogap.diagnose.adapters.contract_ops import contract_replacements
from zerogap.diagnose.adapters.row_ops import row_replacements
from zerogap.diagnose.adapters.torch_side import TorchSide
from zerogap.diagnose.checks import (
    cache,
    definition,
    ids,
    layout,
    neighbours,
    operators,
    path,
    rerun,
    routing,
    weights,
)
from zerogap.diagnose.compare import statistics, worst_tokens
from zerogap.diagnose.facts import Facts
from zerogap.diagnose.findings import Heat, OperatorShare, Report
from zerogap.diagnose.heat import heat_of
from zerogap.diagnose.shares import operator_shares, shares
from zerogap.diagnose.side import RecordedSide, Replacement, Side
from zerogap.diagnose.trace import Trace, load_trace
from zerogap.diagnose.verdict import UNATTRIBUTED, UNKNOWN, Cause, Finding, Verdict
from zerogap.diagnose.zerogap_side import ZerogapSide
from zerogap.errors import ConfigError

CHECKS: tuple[tuple[str, Callable[[Side, Side, Facts], Finding]], ...] = (
    ("ids", ids.check),
    ("definition", definition.check),
    ("weights", weights.check),
    ("cache", cache.check),
    ("rerun", rerun.check),
    ("neighbours", neighbours.check),
    ("path", path.check),
    ("layout", layout.check),
    ("operators", operators.check),
    ("routing", routing.check),
)
NUMERIC = ("operators", "neighbours", "path", "layout", "routing")  # checks behind which operators may stand
WORTH = 0.01  # least share of a kind of operator that is replayed for its name
MOST, LITTLE = 0.5, 0.2  # shares of kinds of operators
ADVICE: Mapping[str, str] = {
    "ids": "feed both sides the same token ids: never decode and encode again, and use one chat template",
    "definition": "score both sides under one definition of the log-prob, then diagnose again",
    "weights": "load the tensors that differ again from one source, and compare digests after every update",
    "buffers": "build the buffers that differ from one config, in FP32",
    "cache": "drop keys and values after every update, and check prefix, positions and scales of what is reused",
    "rerun": "find what draws or races: dropout, atomics, autotuning; diagnose again once a run repeats itself",
    "neighbours": "use kernels whose result does not depend on the batch, or score each sequence alone to confirm",
    "path": "compute both sides by the same path, or use kernels that give the same bits on both",
    "layout": "use the same parallel sizes on both sides, or a fixed order of the sums over ranks",
    "routing": "make what stands before the router equal: the flipped experts follow from it",
}
OPERATOR_ADVICE = "give both sides one form of this operator; the named field is where the two forms part"
Given = Side | Trace | str | Path


def diagnose(
    a: Given,
    b: Given,
    *,
    progress: Callable[[str], None] | None = None,
    thorough: bool = False,
    replacements: Mapping[str, Mapping[str, Replacement]] | None = None,
) -> Report:
    """Name the cause of the logdiff between two sides, or say that there is none, or that it is not known.

    Args:
        a, b: live sides, traces, or folders of traces. A is taken for the rollout where that matters (k3).
        progress: told in words what comes next.
        thorough: dear checks run even if no log-prob differs, and every kind of operator is replayed.
        replacements: side -> operator kind -> what that side computes it with instead, for shares of operators; None:
            the contract's operators in a torch model that is held against zerogap, else none.

    Raises:
        CheckpointError: a path that is no readable trace.
        ConfigError: no token can be compared.
    """
    began = time.perf_counter()
    facts = Facts(_side(a), _side(b), progress or (lambda text: None), thorough)
    findings = []
    for name, check in CHECKS:
        facts.progress(name)
        findings.append(check(facts.a, facts.b, facts))
        if name == "ids" and findings[0].outcome == "failed":
            findings += [Finding(n, "not checked", "the sides have read other tokens") for n, _ in CHECKS[1:]]
            break
        if not facts.difference.compared.any():
            raise ConfigError("log-probs", 0, "no token has a log-prob on both sides and counts: check the masks")
    verdict = decide(findings, facts)
    of_kinds: tuple[OperatorShare, ...] = ()
    parts = shares(facts, {})
    if verdict.check in NUMERIC:
        by_rows = _by_rows(facts) if verdict.check == "path" else {}
        given = by_rows or (_contract(facts) if replacements is None else replacements)
        of_kinds, parts = operator_shares(facts, given), shares(facts, given)
        worth = [s.kind for s in of_kinds if max(s.share, s.alone or 0.0) >= WORTH]
        more = [] if by_rows else operators.further_kinds(facts, worth)
        for which, kinds in by_rows.items():
            more += operators.decoded_kinds(facts, which, {kind: kinds[kind] for kind in worth})
        facts.attributions += more
        verdict = _with_kinds(verdict, [found.cause for found in more], of_kinds)
    one, other = facts.a.trace, facts.b.trace
    return Report(
        one.name,
        other.name,
        verdict,
        tuple(findings),
        statistics(facts.difference, one),
        facts=_sides_facts(one, other, facts),
        shares=parts,
        operators=of_kinds,
        worst=tuple(worst_tokens(facts.difference, one)),
        attributions=tuple(facts.attributions),
        heat=_heat(facts),
        notes=tuple(dict.fromkeys(facts.notes)),
        seconds=time.perf_counter() - began,
    )


def _contract(facts: Facts) -> Mapping[str, Mapping[str, Replacement]]:
    """For a torch model against zerogap: the contract's operators, to be put into the model."""
    for which, other in (("a", facts.b), ("b", facts.a)):
        side = facts.side(which)
        if isinstance(side, TorchSide) and isinstance(other, ZerogapSide):
            meaning = facts.answers[which].definition
            temperature = meaning.temperature if meaning.processed and meaning.temperature else 1.0
            return {which: contract_replacements(side, other.decoder.numerics, temperature)}
    return {}


def _by_rows(facts: Facts) -> Mapping[str, Mapping[str, Replacement]]:
    """Where one side decoded and the other computed whole sequences: the latter's operators, row by row."""
    for which, other in (("a", "b"), ("b", "a")):
        side, answer = facts.side(which), facts.answers[which]
        alone = all(len(batch) == 1 for batch in answer.batches or ())
        if isinstance(side, TorchSide) and answer.path == "whole" and alone and facts.answers[other].path == "decode":
            return {which: row_replacements(side)}
    return {}


def _side(given: Given) -> Side:
    if isinstance(given, str | Path):
        given = load_trace(Path(given))
    return RecordedSide(given) if isinstance(given, Trace) else given


# ---------------------------------------------------------------------------------------------------- the verdict


def decide(findings: Sequence[Finding], facts: Facts) -> Verdict:
    """The verdict: the first failed check whose causes account for the difference; then the first that may."""
    failed = [f for f in findings if f.outcome == "failed"]
    unlike = bool(failed) and failed[0].check == "ids"
    if facts.difference.same and not unlike:
        return Verdict(True, "", None, _unique(c for f in failed for c in f.causes), _same_next(failed))
    named = [f for f in failed if f.causes and f.causes[0].field != UNATTRIBUTED]
    ranked = [f for f in named if f.evidence.get("accounts") is True]
    ranked += [f for f in named if f.evidence.get("accounts") is None]
    ranked += [f for f in failed if f.causes and f.evidence.get("accounts") is True]
    deciding = ranked[0] if ranked else None
    if deciding is None:
        first = failed[0].check if failed else ""
        further = _unique(c for f in failed for c in f.causes)
        return Verdict(False, first, UNKNOWN, further, _needs(findings))
    cause = deciding.causes[0]
    rest = [*deciding.causes[1:], *(c for f in failed if f is not deciding for c in f.causes)]
    further = tuple(c for c in _unique(rest) if c.name != cause.name and not _follows(c, deciding))
    known = cause.field != UNATTRIBUTED
    step = ADVICE.get(cause.subject, OPERATOR_ADVICE) if known else _needs([deciding, *findings])
    return Verdict(False, deciding.check, cause, further, step)


def _with_kinds(verdict: Verdict, causes: Sequence[Cause], of_kinds: Sequence[OperatorShare]) -> Verdict:
    """The verdict with further operators, all further causes in order of their kind's share. A kind whose replacement
    alone removes most of the difference decides in the place of one that merely comes first and removes little."""
    order = {share.kind: place for place, share in enumerate(of_kinds)}
    removes = {share.kind: share.share for share in of_kinds}
    named = _unique([*verdict.further, *(c for c in causes if c.field != UNATTRIBUTED)])
    cause = verdict.cause
    if verdict.check == "operators" and cause is not None and removes.get(cause.subject, 1.0) < LITTLE:
        main = next((c for c in named if removes.get(c.subject, 0.0) >= MOST), None)
        if main is not None:
            named, cause = _unique([cause, *named]), main
    own = "" if cause is None else cause.name
    further = sorted((c for c in named if c.name != own), key=lambda c: order.get(c.subject, len(order)))
    return dataclasses.replace(verdict, cause=cause, further=tuple(further))


def _follows(cause: Cause, deciding: Finding) -> bool:
    """Log-probs under unlike definitions differ in the op that computes them, too."""
    return deciding.check == "definition" and cause.subject == "logprob"


def _unique(causes: object) -> tuple[Cause, ...]:
    found: dict[str, Cause] = {}
    for cause in causes:  # type: ignore[attr-defined]
        if cause != UNKNOWN and cause.subject != UNKNOWN.subject:
            found.setdefault(cause.name, cause)
    return tuple(found.values())


def _same_next(failed: Sequence[Finding]) -> str:
    if failed:
        return "nothing: no log-prob differs; what is listed besides shows in none of these tokens"
    return "nothing: no log-prob differs"


def _needs(findings: Sequence[Finding]) -> str:
    """What to record next."""
    for finding in findings:
        if finding.outcome in ("not checked", "failed") and finding.needs:
            return finding.needs
    return "give live sides, so that operators can be replaced one kind at a time"


# ---------------------------------------------------------------------------------------------------- the report


def _sides_facts(one: Trace, other: Trace, facts: Facts) -> tuple[tuple[str, str, str], ...]:
    """(label, of A, of B) in words."""
    rows = [("sequences, tokens", *(f"{len(t.sequences)}, {t.num_rows}" for t in (one, other)))]
    rows.append(("path", facts.answers["a"].path, facts.answers["b"].path))
    definitions = [facts.answers[w].definition for w in ("a", "b")]
    for name in ("temperature", "processed", "top_k", "top_p", "min_p"):
        values = [getattr(d, name) for d in definitions]
        rows.append((name, *("not stated" if v is None else str(v) for v in values)))
    for label, left, right in (("version of", one.versions, other.versions), ("layout:", one.layout, other.layout)):
        for name in dict.fromkeys([*left, *right]):
            rows.append((f"{label} {name}", str(left.get(name, "")), str(right.get(name, ""))))
    return tuple((a, b, c) for a, b, c in rows)


def _heat(facts: Facts) -> Heat | None:
    lengths = facts.lengths_of("a")
    if lengths != facts.lengths_of("b"):
        return None
    return heat_of(facts.walk().distance, lengths)
