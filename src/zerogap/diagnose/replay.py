"""From the operator at which two passes part to its name: the captured inputs are given to the search for forms.

What is handed on is cut to the rows in which both sides read the same bits; attention keeps whole beginnings of
sequences. An operator that was not recorded by itself, but with others in one region, is not named.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np
import torch

from zerogap.diagnose.attribute import Attribution, explain
from zerogap.diagnose.bisect import OVER_ROWS, Divergence, with_logprobs
from zerogap.diagnose.compare import recorded_rows
from zerogap.diagnose.facts import Facts
from zerogap.diagnose.findings import Attributed
from zerogap.diagnose.graph import Node
from zerogap.diagnose.side import Side
from zerogap.diagnose.trace import Pass, Trace
from zerogap.diagnose.verdict import OPERATORS, UNATTRIBUTED, UNKNOWN, Cause

PARAMETERS: Mapping[str, Mapping[str, str]] = {  # kind -> what sides may state unlike -> the field that it is
    "norm": {"eps": "formula"},
    "rope": {"theta": "formula", "interleaved": "formula", "positions": "positions"},
    "attention": {"scale": "scale", "sliding_window": "mask", "causal": "mask"},
    "activation": {"activation": "formula"},
    "router": {"scoring": "formula", "normalise": "formula", "scaling": "scale", "top_k": "formula"},
    "logprob": {"temperature": "formula"},
}
ALONE = 16  # decoded rows that are replayed as sequences of their own
MAX_ROWS = 512  # of an operator that are handed to the search


@dataclasses.dataclass(frozen=True, eq=False)
class Ends:
    """One side of a replay: who computed a pass."""

    side: Side
    found: Pass


@dataclasses.dataclass(frozen=True, eq=False)
class _Rows:
    """Rows that are handed on, per sequence, with their tokens."""

    index: torch.Tensor
    lengths: list[int]
    positions: torch.Tensor
    ids: torch.Tensor
    targets: torch.Tensor


def _rows(trace: Trace, wanted: torch.Tensor, whole: bool) -> _Rows:
    """Chosen rows: of every sequence its first ones until one is not wanted (`whole`), or all that are wanted."""
    index: list[torch.Tensor] = []
    lengths: list[int] = []
    ids, targets, positions, start = [], [], [], 0
    for sequence in trace.sequences:
        count = len(sequence.ids)
        keep = wanted[start : start + count]
        local = torch.nonzero(keep.cumprod(0) > 0 if whole else keep)[:, 0]
        tokens = torch.from_numpy(sequence.ids.astype("int64"))
        following = torch.cat([tokens[1:], torch.tensor([-1])])
        at = torch.arange(count) if sequence.positions is None else torch.from_numpy(sequence.positions.astype("int64"))
        if len(local) and sum(lengths) + len(local) <= max(MAX_ROWS, count):
            index.append(local + start)
            lengths.append(len(local))
            ids.append(tokens[local])
            targets.append(following[local])
            positions.append(at[local])
        start += count
    none = torch.zeros(0, dtype=torch.int64)
    joined = (torch.cat(parts) if parts else none for parts in (index, positions, ids, targets))
    rows, places, tokens_, following_ = joined
    return _Rows(rows, lengths, places, tokens_, following_)


def _each_alone(trace: Trace, wanted: torch.Tensor) -> tuple[_Rows, torch.Tensor]:
    """Every wanted row as the last of a sequence of its own, a few spread evenly; and bool [R]: these last rows."""
    starts = torch.tensor([0, *(len(s.ids) for s in trace.sequences)]).cumsum(0)
    chosen = wanted.nonzero()[:, 0]
    chosen = chosen[torch.linspace(0, len(chosen) - 1, min(len(chosen), ALONE)).long().unique()]
    index: list[torch.Tensor] = []
    for row in chosen.tolist():
        start = int(starts[torch.searchsorted(starts, row, right=True) - 1])
        if sum(map(len, index)) + row + 1 - start <= MAX_ROWS or not index:
            index.append(torch.arange(start, row + 1))
    joined = torch.cat(index)
    last = torch.zeros(len(joined), dtype=torch.bool)
    last[torch.tensor([len(part) for part in index]).cumsum(0) - 1] = True
    ids = torch.cat([torch.from_numpy(s.ids.astype("int64")) for s in trace.sequences])
    positions = torch.cat([torch.arange(len(part)) for part in index])
    rows = _Rows(joined, [len(part) for part in index], positions, ids[joined], torch.full_like(joined, -1))
    return rows, last


def weights_of(node: Node, side: Side) -> Mapping[str, torch.Tensor]:
    """The operator's weights and biases as the side has them, by checkpoint name."""
    names = [*node.weights, *(n.removesuffix(".weight") + ".bias" for n in node.weights)]
    if node.kind in ("router", "experts"):
        layer = f"model.layers.{node.name.split('.')[0]}.mlp."
        names += [f"{layer}gate.weight", f"{layer}gate.e_score_correction_bias"]
    if node.kind == "experts":
        parts = ("gate_proj", "up_proj", "down_proj")
        names += [f"{layer}shared_experts.{part}.weight" for part in parts]
        for expert in range(4096):
            if side.weight(f"{layer}experts.{expert}.gate_proj.weight") is None:
                break
            names += [f"{layer}experts.{expert}.{part}.weight" for part in parts]
    found = {name: side.weight(name) for name in dict.fromkeys(names)}
    return {name: value for name, value in found.items() if value is not None}


def attributed(divergence: Divergence, a: Ends, b: Ends, trace: Trace, *, mixed: bool = False) -> Attributed:
    """Name the operator, and the field of its numerics if both sides' bits could be reproduced.

    Args:
        divergence: where two passes part. Rows with equal inputs are replayed; where there are none, each side is
            replayed on its own.
        trace: whose tokens the rows are.
        mixed: a pass may compute some rows by one form and some by another (a prompt, then decoding): only rows that
            differ are to be reproduced.
    """
    node = divergence.node
    if divergence.region:
        between = ", ".join(n.name for n in divergence.region)
        return Attributed(node.name, dataclasses.replace(UNKNOWN, detail=f"{node.name}, with {between} not recorded"))
    if node.kind not in OPERATORS:
        return Attributed(node.name, UNKNOWN)
    alike = bool(divergence.equal_inputs.any())
    out_a, out_b = (with_logprobs(end.found).boundaries[node.name] for end in (a, b))
    wanted = divergence.equal_inputs if alike else torch.ones_like(divergence.rows)
    wanted = wanted & recorded_rows(out_a) & recorded_rows(out_b)
    if mixed:
        decoded = "decode" in (a.found.path, b.found.path)
        parting = divergence.rows
        if decoded and bool((parting & wanted & _completions(trace)).any()):
            parting = parting & _completions(trace)  # a prompt is computed at once, by a form of its own
        found = _replayed(node, alike, wanted, a, b, trace, parting)
        if found.cause.field != UNATTRIBUTED or not (decoded and node.kind in OVER_ROWS):
            return found
        # A decoded row has its own keys and no more: what is cut into parts is cut by their number.
        rows, last = _each_alone(trace, wanted & parting)
        out_a, out_b = (out[rows.index].masked_fill(~last[:, None], float("nan")) for out in (out_a, out_b))
        alone = _searched(node, alike, a, b, rows, out_a, out_b)
        return found if alone.cause.field == UNATTRIBUTED else alone
    found = _replayed(node, alike, wanted, a, b, trace)
    parted = wanted & _in_sequences(trace, divergence.rows)
    if found.cause.field == UNATTRIBUTED and bool((parted != wanted).any()):
        # A side may compute each sequence by another form; those that part are the ones to be explained.
        again = _replayed(node, alike, parted, a, b, trace)
        found = found if again.cause.field == UNATTRIBUTED else again
    return found


def _completions(trace: Trace) -> torch.Tensor:
    """bool [R]: rows of completion tokens."""
    return torch.cat([torch.arange(len(s.ids)) >= s.prompt_length for s in trace.sequences])


def _in_sequences(trace: Trace, rows: torch.Tensor) -> torch.Tensor:
    """bool [R]: rows of sequences that have any of the given ones."""
    parts = rows.split([len(s.ids) for s in trace.sequences])
    return torch.cat([torch.full_like(part, bool(part.any())) for part in parts])


def _replayed(
    node: Node, alike: bool, wanted: torch.Tensor, a: Ends, b: Ends, trace: Trace, only: torch.Tensor | None = None
) -> Attributed:
    """The search over the wanted rows; of those that are handed on, `only` some are to be reproduced."""
    out_a, out_b = (with_logprobs(end.found).boundaries[node.name] for end in (a, b))
    over_rows = node.kind in OVER_ROWS
    if only is not None:
        out_a, out_b = (out.masked_fill(~only[:, None], float("nan")) for out in (out_a, out_b))
        wanted = wanted if over_rows else wanted & only
    rows = _rows(trace, wanted, whole=over_rows)
    return _searched(node, alike, a, b, rows, out_a[rows.index], out_b[rows.index])


def _searched(
    node: Node, alike: bool, a: Ends, b: Ends, rows: _Rows, out_a: torch.Tensor, out_b: torch.Tensor
) -> Attributed:
    """The search over rows that are handed on; NaN in the outputs that are not to be reproduced."""
    given = [_given(node, end, rows) for end in (a, b)]
    (inputs, weights, parameters), (inputs_b, weights_b, parameters_b) = given
    weights = weights or weights_b  # of a recorded side they may not be at hand; the check of weights compared sketches
    if node.weights and not weights:
        text = f"{node.name}: its weights are at hand on neither side: name their folder as a trace's source"
        return Attributed(node.name, Cause(node.kind, UNATTRIBUTED, text))
    outs = out_a, out_b
    theirs = None if _same_weights(weights, weights_b) else weights_b
    if not alike:
        found = explain(
            node, node.kind, inputs, weights, parameters, *outs,
            inputs_b=inputs_b, weights_b=theirs, parameters_b=parameters_b,
        )  # fmt: skip
        return _in_words(node.name, found)
    found = explain(node, node.kind, inputs, weights, parameters, *outs, weights_b=theirs)
    stated = _stated(node.kind, parameters, parameters_b)
    if found.cause.field == UNATTRIBUTED and stated is not None:
        key, field = stated
        own = explain(node, node.kind, inputs, weights, parameters, *outs, weights_b=theirs, parameters_b=parameters_b)
        if own.same:  # one form gives both sides' bits, each with the side's own value
            told = [v for v in (parameters[key], parameters_b[key]) if not isinstance(v, torch.Tensor)]
            words = f"{key} is {told[0]} on A, {told[1]} on B" if told else f"the sides state unlike {key}"
            words = f"{node.name}: {words}"
            found = dataclasses.replace(own, cause=Cause(node.kind, field, words))
    return _in_words(node.name, found)


def _stated(kind: str, one: Mapping[str, object], other: Mapping[str, object]) -> tuple[str, str] | None:
    """(parameter, field of the kind) of the first parameter that both sides state, unlike."""
    for key, field in PARAMETERS.get(kind, {}).items():
        if key in one and key in other and _unlike(one[key], other[key]):
            return key, field
    return None


def _unlike(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return not torch.equal(one, other)
    return one != other


def _own_positions(trace: Trace, rows: _Rows) -> torch.Tensor:
    """Positions as the side itself states them; those of the rows' tokens where it does not."""
    if any(s.positions is None for s in trace.sequences):
        return rows.positions
    stated = torch.cat([torch.from_numpy(np.asarray(s.positions, np.int64)) for s in trace.sequences])
    return stated[rows.index] if len(rows.index) and int(rows.index.max()) < len(stated) else rows.positions


def _given(
    node: Node, end: Ends, rows: _Rows
) -> tuple[dict[str, torch.Tensor], Mapping[str, torch.Tensor], dict[str, object]]:
    """(inputs, weights, parameters) of an operator as one side has them, over the chosen rows."""
    inputs = {n: end.found.boundaries[n][rows.index] for n in node.inputs}
    facts: dict[str, object] = dict(end.side.parameters(node.name))
    facts |= {
        "lengths": rows.lengths,
        "positions": _own_positions(end.side.trace, rows),
        "ids": rows.ids,
        "targets": rows.targets,
    }
    if node.kind == "logprob":
        facts |= {k: v for k, v in dataclasses.asdict(end.found.definition).items() if v is not None}
    return inputs, weights_of(node, end.side), facts


def _same_weights(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """True if the other side's are the same, or are not at hand."""
    return not other or all(
        n in one and one[n].shape == t.shape and torch.equal(one[n].double(), t.double()) for n, t in other.items()
    )


def _in_words(name: str, found: Attribution) -> Attributed:
    a, b = found.a, found.b
    some = a or b
    cause = found.cause
    if found.same and cause == UNKNOWN:
        cause = dataclasses.replace(UNKNOWN, detail=f"{name}: one form gives both sides' bits, so it is not the cause")
    others = [str(v) for r in (a, b) if r is not None for v in r.alternatives]
    return Attributed(
        name,
        cause,
        "" if a is None else str(a.variant),
        0.0 if a is None else a.share_all,
        "" if b is None else str(b.variant),
        0.0 if b is None else b.share_all,
        0 if some is None else some.elements,
        0 if some is None else some.differing,
        tuple(dict.fromkeys(others))[:12],
    )


def within_side(which: str, one: Pass, other: Pass, facts: Facts) -> tuple[tuple[Cause, ...], str]:
    """The operator that differs between two passes of one side, if it can be named to its field; and where the passes
    part first, in words."""
    side = facts.side(which)
    first = facts.walk(one, other, which).first
    if first is None:
        return (), ""
    facts.progress(f"replay of {first.node.name}, two passes of side {which.upper()}")
    found = attributed(first, Ends(side, one), Ends(side, other), side.trace, mixed=True)
    facts.attributions.append(dataclasses.replace(found, between=f"two passes of side {which.upper()}"))
    named = () if found.cause.field == UNATTRIBUTED else (found.cause,)
    return named, f"; its passes part first at {first.node.name}"
