"""Check 2: both sides mean the same number by "log-prob".

Every hypothesis predicts numbers: a shift or another unit predicts one side's from the other's, a temperature, a
filter or a wrong token predicts a side's from its own logits. It is accepted only if what it predicts removes the
difference (`compare.explains`), and the simplest accepted one names the cause. Arrays alone decide shift, unit and
end of sequence; the rest needs logits: a captured `lm_head`, or a side that can score again.
"""

import dataclasses
from collections.abc import Iterator, Mapping

from zerogap.diagnose.checks import relations, rescoring
from zerogap.diagnose.compare import Difference, explains
from zerogap.diagnose.facts import Facts
from zerogap.diagnose.side import Side
from zerogap.diagnose.trace import Definition, Trace
from zerogap.diagnose.verdict import Cause, Finding

NEEDS = (
    "record what the log-probs mean on both sides (temperature, raw or processed, top-k, top-p, min-p), or the logits "
    "(`lm_head`) of a few sequences; arrays also need `processed` (true or false) beside the temperature"
)
HALF = 0.5  # of mean |d| that a stated definition may leave


def check(a: Side, b: Side, facts: Facts) -> Finding:
    """See the module."""
    before = facts.difference
    if not before.compared.any():
        return _nothing(before)
    if before.same:
        count = int(before.compared.sum())
        return Finding("definition", "passed", f"{count} log-probs are the same bits, so they mean the same")
    tried: list[str] = []
    best: dict[str, relations.Hypothesis] = {}  # field -> what takes away most
    for hypothesis in _hypotheses(a, b, facts, before, tried):
        held = best.get(hypothesis.field)
        if held is None or hypothesis.after.mean < held.after.mean:
            best[hypothesis.field] = hypothesis
        accounts = explains(before, hypothesis.after) if hypothesis.accounts is None else True
        if accounts:
            facts.substituted["definition"] = hypothesis.after
            text = (
                f"{hypothesis.text}: mean |d| {before.mean:.3g} becomes {hypothesis.after.mean:.3g} "
                f"over {int(hypothesis.after.compared.sum())} tokens"
            )
            accounts = hypothesis.accounts is not False
            evidence = {"accounts": accounts, "before": before.mean, "after": hypothesis.after.mean, "tried": tried}
            cause = Cause("definition", hypothesis.field, hypothesis.text)
            return Finding("definition", "failed", text, (cause,), evidence=evidence)
    return _stated(a, b, facts, before, tried, best)


def _nothing(before: Difference) -> Finding:
    text = "no token has a log-prob on both sides"
    if before.num_missing:
        text += f"; {before.num_missing} have one on one side only"
    return Finding("definition", "not checked", text, needs="record log-probs of the same tokens on both sides")


def _hypotheses(a: Side, b: Side, facts: Facts, before: Difference, tried: list[str]) -> Iterator[relations.Hypothesis]:
    ends = list(relations.last_token(before, a.trace, b.trace))
    for name, made in (
        ("shift by one", relations.shifts(before, facts)),
        ("shift by one in parts", relations.partial_shifts(before, facts)),
        ("unit", relations.units(before)),
        ("end of sequence", (h for h in ends if h.accounts)),
        ("temperature, filters, wrong token", rescoring.rescored(a, b, facts, before)),
        ("missing ends", (h for h in ends if not h.accounts)),
    ):
        tried.append(name)
        yield from made


def _stated(
    a: Side, b: Side, facts: Facts, before: Difference, tried: list[str], best: Mapping[str, relations.Hypothesis]
) -> Finding:
    """No hypothesis removes the difference: what the sides themselves say, and whether their logits bear it out.

    Unlike definitions that both sides state are a fact; they account for the difference if scoring under one takes away
    at least half of it, and where there is nothing to score with.
    """
    one, other = facts.answers["a"].definition, facts.answers["b"].definition
    evidence: dict[str, object] = {"accounts": False, "tried": tried}
    field = differing_field(one, other, a.trace, b.trace)
    borne_out = {which: rescoring.borne_out(which, facts) for which in ("a", "b")}
    evidence["borne out by logits"] = borne_out
    if field is not None:
        text = f"the sides state different definitions ({_words(one)}; {_words(other)})"
        scored = any(v is not None for v in borne_out.values()) or any(facts.live(w) for w in ("a", "b"))
        after = best[field].after if field in best else before
        if scored and after.mean <= HALF * before.mean:
            facts.substituted["definition"] = after
            evidence |= {"accounts": True, "before": before.mean, "after": after.mean}
            text += f"; under one of them mean |d| {before.mean:.3g} becomes {after.mean:.3g}"
        elif scored:
            text += ", but scoring under the other's does not remove the difference"
        else:
            evidence["accounts"] = True
        return Finding("definition", "failed", text, (Cause("definition", field, text),), evidence=evidence)
    if all(borne_out.values()):
        return Finding("definition", "passed", "both sides' numbers follow from their own logits", evidence=evidence)
    known = [d for d in (one, other) if d.processed is not None and d.temperature is not None]
    if len(known) == 2:
        return Finding("definition", "passed", f"both sides state {_words(one)}; {_tried(tried)}", evidence=evidence)
    return Finding("definition", "not checked", f"at least one side does not say; {_tried(tried)}", needs=NEEDS)


def _tried(tried: list[str]) -> str:
    return f"{', '.join(tried)} do not explain the difference"


def _words(definition: Definition) -> str:
    values = {k: v for k, v in dataclasses.asdict(definition).items() if v is not None}
    return ", ".join(f"{k} {v}" for k, v in values.items()) or "nothing stated"


def differing_field(one: Definition, other: Definition, a: Trace, b: Trace) -> str | None:
    """`temperature`, `processed` or `kept_set`, by what both sides state; None if nothing contradicts.

    Raw log-probs at temperature 1 without filters are processed ones.
    """
    x, y = effective(one), effective(other)
    if x is None or y is None or x == y:
        return None
    if one.processed is not None and other.processed is not None and one.processed != other.processed:
        return "processed"
    if x["temperature"] != y["temperature"]:
        return "temperature"
    return "kept_set"


def effective(definition: Definition) -> Mapping[str, float] | None:
    """Temperature and filters that the numbers are under; None if the side does not say enough."""
    if definition.processed is False:
        return {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    if definition.processed is None or definition.temperature is None:
        return None
    return {
        "temperature": definition.temperature or 1.0,  # greedy decoding records the untempered distribution
        "top_k": definition.top_k or 0,
        "top_p": 1.0 if definition.top_p is None else definition.top_p,
        "min_p": definition.min_p or 0.0,
    }
