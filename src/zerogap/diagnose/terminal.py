"""A diagnosis as lines of text: verdict, chain of evidence, next step. No colours here: a line says what it is."""

import dataclasses
import math
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from zerogap.diagnose.findings import Attributed, Report
from zerogap.diagnose.meanings import meaning
from zerogap.diagnose.verdict import UNATTRIBUTED, Finding

WIDTH = 112
TOKENS = 5  # worst tokens that are shown
ATTRIBUTED = 4  # operators whose forms are shown
ALTERNATIVES = 2  # further forms of each
MARKS = {"passed": "ok  ", "failed": "FAIL", "not checked": "?   "}


@dataclasses.dataclass(frozen=True)
class Line:
    """One line and what it is: `head`, `good`, `bad`, `open` (not known), `soft` (a remark) or empty."""

    text: str
    tone: str = ""


def summary(report: Report) -> list[Line]:
    """The whole report in at most about fifty lines."""
    lines = [*_verdict(report), Line("")]
    lines += [Line("Log-probs", "head"), *_statistics(report.statistics), Line("")]
    lines += [Line("Chain of evidence", "head"), *(line for f in report.findings for line in _finding(f))]
    lines += [Line(f"note: {note}", "soft") for note in report.notes]
    if report.shares or report.operators:
        lines += [Line(""), Line("Shares of mean |d|", "head"), *_shares(report)]
    if report.attributions:
        lines += [Line(""), Line("Operators", "head")]
        lines += [line for found in report.attributions[:ATTRIBUTED] for line in _attributed(found)]
        if len(report.attributions) > ATTRIBUTED:
            lines.append(Line(f"  and {len(report.attributions) - ATTRIBUTED} more", "soft"))
    if report.worst:
        lines += [Line(""), Line("Worst tokens", "head"), *map(_token, report.worst[:TOKENS])]
    return [*lines, Line(""), *_wrapped("Next: ", next_step(report), "head")]


def next_step(report: Report) -> str:
    """What to do: the verdict's own words, or the mend of its cause."""
    verdict = report.verdict
    if verdict.next_step:
        return verdict.next_step
    if verdict.same or verdict.cause is None:
        return "nothing differs: there is nothing to mend"
    return meaning(verdict.cause).mend


def number(value: object) -> str:
    """A statistic as people read it: `0` only where it is exactly 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return str(value)
    return "0" if value == 0 else f"{value:.3g}"


def _wrapped(label: str, text: str, tone: str = "") -> Iterator[Line]:
    indent = " " * len(label)
    for i, part in enumerate(textwrap.wrap(text, WIDTH - len(label)) or [""]):
        yield Line((indent if i else label) + part, tone)


def _verdict(report: Report) -> Iterator[Line]:
    verdict = report.verdict
    yield Line(f"A: {report.a_name}    B: {report.b_name}", "soft")
    if verdict.same:
        yield Line(
            f"SAME: all {number(report.statistics.get('count'))} compared log-probs are equal, bit for bit", "good"
        )
        return
    cause = verdict.cause
    unknown = cause is None or cause.subject == UNATTRIBUTED
    name = UNATTRIBUTED if cause is None or unknown else cause.name
    where = f" (check: {verdict.check})" if verdict.check else ""
    yield Line(f"DIFFERENT: {name}{where}", "open" if unknown else "bad")
    if cause is not None:
        yield from _wrapped("  ", meaning(cause).text)
        if cause.detail:
            yield from _wrapped("  ", cause.detail)
    if verdict.further:
        yield from _wrapped("  also: ", ", ".join(c.name for c in verdict.further))


def _statistics(found: Mapping[str, Any]) -> Iterator[Line]:
    missing = f", {number(found['missing'])} recorded on one side only" if found.get("missing") else ""
    yield Line(f"  {number(found.get('count'))} compared, {number(found.get('different'))} different{missing}")
    names = (("mean |d|", "mean"), ("max", "max"), ("p99.9", "p999"), ("k3", "k3"))
    yield Line("  " + "   ".join(f"{label} {number(found.get(key))}" for label, key in names))
    worst = found.get("worst_sequence")
    if found.get("different") and isinstance(worst, Mapping):
        yield Line(f"  worst sequence: {worst['sequence']}, mean |d| {number(worst['mean'])}")


def _finding(finding: Finding) -> Iterator[Line]:
    tone = {"passed": "good", "failed": "bad", "not checked": "open"}[finding.outcome]
    text = finding.text
    if finding.outcome == "failed" and finding.evidence.get("accounts") is False:
        text += "; it does not account for the difference of the two sides, so it does not decide"
    yield from _wrapped(f"  {MARKS[finding.outcome]} {finding.check:<11} ", text, tone)
    indent = " " * 19
    for cause in finding.causes:
        yield from _wrapped(f"{indent}{cause.name}: ", cause.detail or meaning(cause).text)
    if finding.needs:
        yield from _wrapped(f"{indent}to check it: ", finding.needs, "soft")


def _shares(report: Report) -> Iterator[Line]:
    for share in report.shares:
        yield Line(f"  {share.part:<11} {share.share:>7.1%}  {share.substituted}")
    if report.operators:
        yield Line("    of each kind of operator: what vanishes if it alone is replaced, what it alone adds", "soft")
    for operator in report.operators:
        alone = "" if operator.alone is None else f" {operator.alone:>7.1%}"
        yield Line(f"    {operator.kind:<10} {operator.share:>7.1%}{alone}")


def _attributed(found: Attributed) -> Iterator[Line]:
    where = f", {found.between}" if found.between else ""
    same = found.variant_a and found.variant_a == found.variant_b
    name = "the same form on both sides" if same else found.cause.name
    count = f"{found.differing:,} of {found.elements:,} elements differ"
    if not found.differing and found.elements:
        count = f"each side on its own inputs, {found.elements:,} elements"
    yield Line(f"  {found.node}: {name}{where}" + (f"  ({count})" if found.elements else ""))
    names = ("one", "other") if found.between else ("A", "B")
    for side, form, share in zip(names, (found.variant_a, found.variant_b), (found.share_a, found.share_b)):
        known = f"{form}  reproduces {share:.1%}" if form else "not reproduced by any known form"
        yield from _wrapped(f"    {side}: ", known, "" if form else "open")
    if found.variant_a and found.variant_b and not same and found.cause.field == UNATTRIBUTED:
        words = "a library's whole call says nothing of its inside, or several fields explain the bits"
        yield from _wrapped("    no field is named: ", words, "soft")
    for form in found.alternatives[:ALTERNATIVES]:
        yield from _wrapped("    as well: ", form, "soft")
    if len(found.alternatives) > ALTERNATIVES:
        yield Line(f"    and {len(found.alternatives) - ALTERNATIVES} more forms that give the same bits", "soft")


def _token(token: Mapping[str, Any]) -> Line:
    text = f"  {token['text']!r}" if token.get("text") else ""
    place = f"sequence {token['sequence']}, position {token['position']}, id {token['id']}"
    return Line(f"  d {number(token['d']):>9}   A {number(token['a']):>9}   B {number(token['b']):>9}   {place}{text}")
