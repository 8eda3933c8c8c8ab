"""Check 9: the numerics. Layer by layer and operator by operator to the first one that parts the sides by itself.

The first such operator decides, unless a later one moves the sides so much further apart that the first is only noise
before it. Each is replayed on its captured inputs (`replay`); a field of its numerics is named only if both sides' bits
were reproduced.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from zerogap.diagnose.bisect import Divergence, Walk, nodes_of
from zerogap.diagnose.facts import Facts
from zerogap.diagnose.findings import Attributed
from zerogap.diagnose.graph import Node
from zerogap.diagnose.replay import Ends, attributed
from zerogap.diagnose.side import Ask, Replacement, Side
from zerogap.diagnose.trace import Pass
from zerogap.diagnose.verdict import UNATTRIBUTED, UNKNOWN, Cause, Finding

NEEDS = "record boundary tensors per layer and operator on both sides for a few sequences (zg.capture, or a live side)"
JUMP, NOISE = 8.0, 0.05  # a later operator decides if it moves the sides this much further apart, and beyond this
SKIPPED = ("logprob", "experts", "router")  # ratios of small numbers; flipped experts are the routing check's


def check(a: Side, b: Side, facts: Facts) -> Finding:
    """See the module."""
    if facts.difference.same and not facts.thorough:
        return Finding("operators", "not checked", "nothing differs", needs="")
    facts.progress("operators")
    pass_a, pass_b = _alike(facts)
    if not pass_a.boundaries or not pass_b.boundaries:
        which = " and ".join(n for n, p in (("A", pass_a), ("B", pass_b)) if not p.boundaries)
        return Finding("operators", "not checked", f"no boundaries of side {which}", needs=NEEDS)
    if facts.lengths_of("a") != facts.lengths_of("b"):
        return Finding("operators", "not checked", "the sides have other tokens", needs="")
    found = facts.walk(pass_a, pass_b)
    facts.notes.extend(found.notes)
    if not found.compared:
        return Finding("operators", "not checked", "no boundary has the same name on both sides", needs=NEEDS)
    if found.first is None:
        if found.differing:
            return _undecided(found)
        text = f"{len(found.compared)} boundaries are the same bits"
        return Finding("operators", "passed", text, evidence={"compared": len(found.compared)})
    return _failed(found, Ends(a, pass_a), Ends(b, pass_b), facts)


def _alike(facts: Facts) -> tuple[Pass, Pass]:
    """Both sides' passes with boundaries, computed in the same way where a side can."""
    pass_a, pass_b = (facts.aligned.get(which) or facts.captured(which) for which in ("a", "b"))
    if pass_a.path == pass_b.path or facts.aligned:
        return pass_a, pass_b
    for which, mine, theirs in (("a", pass_a, pass_b), ("b", pass_b, pass_a)):
        if not facts.live(which):
            continue
        found = facts.again(which, Ask(theirs.path, theirs.batches, definition=mine.definition, capture=True))
        if found is not None:
            return (found, pass_b) if which == "a" else (pass_a, found)
    return pass_a, pass_b


def _undecided(found: Walk) -> Finding:
    text = f"boundaries differ from {found.differing[0]} on, but nowhere with the same inputs"
    return Finding("operators", "failed", text, (), evidence={"accounts": False, "differing": found.differing[:20]})


def _failed(found: Walk, a: Ends, b: Ends, facts: Facts) -> Finding:
    """The operators that part the sides, one of each kind, replayed."""
    order = [found.first, *_others(found)]
    if (jump := _jump(found)) is not None:
        order.insert(0, jump)
    causes: list[Cause] = []
    for divergence in order:
        assert divergence is not None, "the walk has a first divergence"
        facts.progress(f"replay of {divergence.node.name}")
        named = attributed(divergence, a, b, facts.a.trace)
        facts.attributions.append(named)
        causes.append(named.cause)
    first = order[0]
    assert first is not None
    node, where = first.node, int(first.rows.sum())
    words = f" (with {len(first.region)} operators before it that were not recorded)" if first.region else ""
    text = (
        f"{node.name} gives other rows for the same inputs{words}: {first.differing} of {first.elements} elements in "
        f"{where} rows, up to {first.relative:.2g} of the row's largest"
    )
    if jump is not None:
        text = (
            f"{node.name} moves the sides far further apart than what it reads: up to {first.relative:.2g} of the row"
        )
    evidence = {
        "accounts": True,
        "first": node.name,
        "diverging": [d.node.name for d in found.diverging][:40],
        "compared": len(found.compared),
        "region": [n.name for n in first.region],
        "causes": [f"{c.name}: {c.detail}" for c in causes],
    }
    needs = ""
    if first.region:
        needs = f"record {', '.join(n.name for n in first.region[:6])} on both sides as well"
    elif causes[0].field == UNATTRIBUTED:
        needs = f"give the weights that {node.name} computes with, and record what it holds inside, on both sides"
    if inside := _inside(node.name, found):
        text += f"; further tensors of its layer: {inside}"
    ordered = [causes[0], *(c for c in causes[1:] if c.field != UNATTRIBUTED)]
    kept = tuple({c.name: c for c in reversed(ordered) if c != UNKNOWN}.values())[::-1]
    return Finding("operators", "failed", text, kept, needs=needs, evidence=evidence)


def _inside(node: str, found: Walk) -> str:
    """Which recorded tensors of the operator's layer that are no operators of the model differ, or empty."""
    nodes = {n.name for n in nodes_of(found.compared)}
    layer, dot, _ = node.partition(".")
    own = [n for n in found.compared if dot and n.startswith(f"{layer}.") and n not in nodes]
    return ", ".join(f"{n} {'differs' if n in found.differing else 'equal'}" for n in own[:6])


def _others(found: Walk) -> list[Divergence]:
    """The first operator of every further kind that diverges itself."""
    seen = {found.diverging[0].node.kind}
    out = []
    for divergence in found.diverging[1:]:
        if divergence.node.kind not in seen and not divergence.region:
            seen.add(divergence.node.kind)
            out.append(divergence)
    return out


def _jump(found: Walk) -> Divergence | None:
    """An operator behind the first whose rows are much further apart than anything before it, though it reads unlike
    rows: the first one's difference is then noise beside it."""
    first = found.diverging[0]
    nodes = nodes_of(found.compared)
    names = [n.name for n in nodes]
    start = names.index(first.node.name) if first.node.name in names else len(names)
    best: tuple[float, Divergence] | None = None
    for node in nodes[start + 1 :]:
        if node.kind in SKIPPED or any(n not in found.distance for n in (node.name, *node.inputs)):
            continue
        out, before = _typical(found.distance[node.name]), max(_typical(found.distance[n]) for n in node.inputs)
        if out < NOISE or before <= 0.0 or out < JUMP * before:
            continue
        if best is None or out / before > best[0]:
            rows = found.distance[node.name] > 0
            none = torch.zeros_like(rows)  # nowhere are its inputs the same
            made = Divergence(
                node,
                (),
                rows,
                none,
                int(rows.sum()),
                len(rows),
                float(found.distance[node.name].nan_to_num(0.0).max()),
                node.inputs,
            )
            best = out / before, made
    own = _typical(found.distance[first.node.name])
    return best[1] if best is not None and own < NOISE else None


def further_kinds(facts: Facts, kinds: Sequence[str]) -> list[Attributed]:
    """Replays of one operator of each kind that no replay has been of: where nothing reads the same rows on both sides
    any more, each side's form is looked for on its own inputs. Of a kind with several operators in a layer (q_proj ...
    down_proj) the first one counts whose forms part."""
    pass_a, pass_b = _alike(facts)
    if not pass_a.boundaries or not pass_b.boundaries:
        return []
    found = facts.walk(pass_a, pass_b)
    nodes = {n.name: n for n in nodes_of(found.compared)}
    known = _kinds_known(facts, nodes)
    out = []
    for kind in kinds:
        alike = [] if kind in known else [n for n in nodes.values() if n.kind == kind and _replayable(n, found)]
        firsts: dict[str, Node] = {}
        for node in alike:
            firsts.setdefault(node.name.rsplit(".", 1)[-1], node)
        tried: list[Attributed] = []
        for node in firsts.values():
            facts.progress(f"replay of {node.name}")
            rows = found.distance[node.name] > 0
            known_one = next((d for d in found.diverging if d.node == node), None)
            divergence = known_one or Divergence(node, (), rows, torch.zeros_like(rows), 0, 0, 0.0, node.inputs)
            ends = Ends(facts.a, pass_a), Ends(facts.b, pass_b)
            tried.append(attributed(divergence, *ends, facts.a.trace))
            if tried[-1].cause.subject != UNKNOWN.subject:
                break
        out += tried[-1:] if tried and tried[-1].cause.subject != UNKNOWN.subject else tried[:1]
    return out


def decoded_kinds(facts: Facts, which: str, replacements: Mapping[str, Replacement]) -> list[Attributed]:
    """Replays of one operator of each kind that no replay has been of, where a side computed whole sequences and the
    other decoded: the side's pass beside the same with only this kind computed as in decoding, so that up to the first
    operator that parts them both read the same rows."""
    side, answer = facts.side(which), facts.captured(which)
    known = _kinds_known(facts, {n.name: n for n in nodes_of(answer.boundaries)})
    out = []
    for kind, operator in replacements.items():
        ask = Ask(answer.path, answer.batches, definition=answer.definition, capture=True, replace={kind: operator})
        other = None if kind in known else facts.again(which, ask)
        first = None if other is None else facts.walk(answer, other, which).first
        if other is None or first is None:
            continue
        facts.progress(f"replay of {first.node.name}")
        by_row, whole = Ends(side, dataclasses.replace(other, path="decode")), Ends(side, answer)
        one, two = (whole, by_row) if which == "a" else (by_row, whole)
        out.append(attributed(first, one, two, side.trace, mixed=True))
    return out


def _kinds_known(facts: Facts, nodes: Mapping[str, Node]) -> set[str]:
    """Kinds of operators that were replayed."""
    return {nodes[done.node].kind for done in facts.attributions if done.node in nodes}


def _replayable(node: Node, found: Walk) -> bool:
    """True if the operator's rows differ, and what it reads was recorded."""
    if any(n not in found.distance for n in (node.name, *node.inputs)):
        return False
    return bool((found.distance[node.name] > 0).any())


def _typical(distance: torch.Tensor) -> float:
    """Median over recorded rows."""
    known = distance[~distance.isnan()]
    return float(known.median()) if len(known) else 0.0
