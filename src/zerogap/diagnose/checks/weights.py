"""Check 3: both sides compute with the same weights and buffers, tensor by tensor.

Live sides are compared by value, recorded ones by their sketches; how a tensor differs is what `sketch` says. A tensor
accounts for the logdiff unless boundaries show that it does not act: its operator gives the same rows wherever it reads
the same ones, and moves no others further apart (rows of an embedding that no token looks up, say). Then it is a
further cause.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zerogap.diagnose.bisect import Walk, nodes_of
from zerogap.diagnose.facts import Facts
from zerogap.diagnose.graph import Node
from zerogap.diagnose.side import Side
from zerogap.diagnose.sketch import compare_sketches, sketch
from zerogap.diagnose.trace import Trace
from zerogap.diagnose.verdict import SUBJECTS, Cause, Finding
from zerogap.errors import ConfigError
from zerogap.models.spec import ModelSpec
from zerogap.numerics import PRESETS

NEEDS = "record digests of the weights on both sides (the trace's `weights`), or name the folders they were loaded from"
GROWTH = 2.0  # how much further apart an operator's rows are than what it read, where its weights act
LISTED = 6  # tensors that are named in one cause
_BUFFERS = ("e_score_correction_bias", "inv_freq", "rope_table", "rotary")


def check(a: Side, b: Side, facts: Facts) -> Finding:
    """See the module."""
    facts.progress("weights")
    if (apart := _other_names(a.trace.weights, b.trace.weights)) is not None:
        return apart
    causes, compared = _weights(a, b)
    buffers, compared_buffers = _buffers(a.trace, b.trace)
    causes += [c for c in buffers if _tensor(c) not in {_tensor(known) for known in causes}]
    compared += compared_buffers
    if not compared and not causes:
        return Finding("weights", "not checked", "no weight is known on both sides", needs=NEEDS)
    if not causes:
        return Finding(
            "weights", "passed", f"{compared} weights and buffers are the same", evidence={"count": compared}
        )
    text = f"{len(causes)} of {compared} weights and buffers differ: {causes[0].name}, {causes[0].detail}"
    known = tuple(c for c in causes if c.field != "unattributed") or tuple(causes)
    accounts = _accounts(known, facts)
    if facts.difference.same:
        accounts = False
    evidence = {"accounts": accounts, "count": compared, "differing": [f"{c.name}: {c.detail}" for c in causes[:50]]}
    return Finding("weights", "failed", text, _together(known, list(a.trace.weights)), evidence=evidence)


def _other_names(a: Mapping[str, Any], b: Mapping[str, Any]) -> Finding | None:
    """Sketches under two schemes of names, none in common: told apart by their digests only; None where any name is."""
    if not a or not b or any(name in b for name in a):
        return None
    words = f"the sides' names of weights have nothing in common (A: {min(a)}; B: {min(b)})"
    digests = [Counter((record.get("digest"), record.get("dtype")) for record in side.values()) for side in (a, b)]
    if digests[0] == digests[1] and len(digests[0]) > 1:
        text = f"{len(a)} weights and buffers are the same, under other names: {words}"
        return Finding("weights", "passed", text, evidence={"count": len(a)})
    return Finding("weights", "not checked", words, needs="record both sides' weights under the same names")


def _together(causes: Sequence[Cause], order: Sequence[str]) -> tuple[Cause, ...]:
    """One cause for all tensors that differ in the same way: how many, their names, and whether they are the last ones
    of `order` (as recorded) or of its sorted order, as after an update that was cut short."""
    groups: dict[str, list[Cause]] = {}
    for cause in causes:
        groups.setdefault(cause.name, []).append(cause)
    out = []
    for first, *rest in groups.values():
        if not rest:
            out.append(first)
            continue
        names = list(dict.fromkeys(_tensor(c) for c in (first, *rest)))
        count = len(names)
        more = f" and {count - LISTED} more" if count > LISTED else ""
        words = f"{first.detail}; {count} tensors in all: {', '.join(names[:LISTED])}{more}"
        if count < len(order):
            ends = [
                n for n, o in (("recorded", list(order)), ("sorted", sorted(order))) if set(o[-count:]) == set(names)
            ]
            words += f"; they are the last {count} of {len(order)} in {' and '.join(ends)} order" if ends else ""
        out.append(Cause(first.subject, first.field, words))
    return tuple(out)


def _weights(a: Side, b: Side) -> tuple[list[Cause], int]:
    names = _names(a.trace, b.trace)
    if a.trace.weights and b.trace.weights:
        causes = _split(compare_sketches(a.trace.weights, b.trace.weights))
        return causes, len(a.trace.weights.keys() & b.trace.weights.keys() | {_tensor(c) for c in causes})
    differing, held = [], []
    sketches: dict[str, dict[str, Any]] = {"a": {}, "b": {}}
    for name in names:
        one, other = _held(a, name), _held(b, name)
        if one is None and other is None:
            continue
        if _one_sided(name, one, other, a, b):
            continue
        held.append(name)
        if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and _equal(one, other)):
            differing.append(name)
    for name in differing or ():
        for side, source in (("a", a), ("b", b)):
            if (value := _held(source, name)) is not None:
                sketches[side][name] = value if isinstance(value, Mapping) else sketch(value)
    if differing:  # where else a value is (swapped, tied): names with the same shape
        _add_partners(a, b, held, differing, sketches)
    causes = [c for c in compare_sketches(sketches["a"], sketches["b"]) if _tensor(c) in differing]
    return _split(causes), len(held)


def _add_partners(a: Side, b: Side, held: list[str], differing: list[str], sketches: dict[str, dict[str, Any]]) -> None:
    ends = {name.rsplit("layers.", 1)[-1].split(".", 1)[-1] for name in differing}
    for name in held:
        alike = name.rsplit("layers.", 1)[-1].split(".", 1)[-1] in ends or name.startswith(("lm_head", "model.embed"))
        if name in differing or not alike:
            continue
        for side, source in (("a", a), ("b", b)):
            if (value := _held(source, name)) is not None:
                sketches[side][name] = value if isinstance(value, Mapping) else sketch(value)


def _one_sided(name: str, one: object, other: object, a: Side, b: Side) -> bool:
    """A tensor that one side has no word of: a tied head, a buffer, or a side that cannot say."""
    if one is not None and other is not None:
        return False
    silent = a if one is None else b
    if name == "lm_head.weight" or _is_buffer(name):
        return True
    return _held(silent, "model.embed_tokens.weight") is None


def _is_buffer(name: str) -> bool:
    return any(part in name for part in _BUFFERS)


def _held(side: Side, name: str) -> torch.Tensor | Mapping[str, Any] | None:
    """A weight, or its sketch."""
    return side.trace.weights[name] if name in side.trace.weights else side.weight(name)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.device.type == "meta" or other.device.type == "meta":
        return False
    return torch.equal(one, other) if one.dtype == other.dtype else False


def _names(a: Trace, b: Trace) -> list[str]:
    """Names that any side knows of: sketches, the model's config, the operators of the boundaries."""
    names = dict.fromkeys([*a.weights, *b.weights])
    for trace in (a, b):
        names |= dict.fromkeys(_by_config(trace.model))
    for node in nodes_of([*a.recorded.boundaries, *b.recorded.boundaries]):
        names |= dict.fromkeys(node.weights)
    return [*names, "model.rotary_emb.inv_freq"]


def _by_config(model: Mapping[str, Any]) -> list[str]:
    if model.get("model_type") is None:
        return []
    try:
        return list(ModelSpec.from_hf(model).weight_specs(PRESETS["fp32"]))
    except ConfigError:  # a model that zerogap does not compute; its names come from elsewhere
        return []


def _buffers(a: Trace, b: Trace) -> tuple[list[Cause], int]:
    common = [name for name in a.buffers if name in b.buffers]
    causes: list[Cause] = []
    for name in common:  # one by one: buffers of equal values are no mistake
        for cause in compare_sketches({name: a.buffers[name]}, {name: b.buffers[name]}):
            field = cause.field if cause.field in SUBJECTS["buffers"] else "stale"
            causes.append(Cause("buffers", field, cause.detail))
    return causes, len(common)


def _split(causes: list[Cause]) -> list[Cause]:
    """Buffers that stand among the weights under their own subject."""
    out = []
    for cause in causes:
        if _is_buffer(_tensor(cause)):
            cause = Cause("buffers", cause.field if cause.field in SUBJECTS["buffers"] else "stale", cause.detail)
        out.append(cause)
    return out


def _tensor(cause: Cause) -> str:
    """Name of the tensor that a cause is about."""
    first, _, rest = cause.detail.partition(": ")
    return rest.split(":")[0] if first in SUBJECTS["weights"] else first


def _accounts(causes: tuple[Cause, ...], facts: Facts) -> bool | None:
    """Whether a differing tensor shows: its operator's output moves further apart than what it reads."""
    found = facts.walk()
    if not found.compared:
        return True
    nodes = nodes_of(found.compared)
    own_head = any("lm_head.weight" in side.trace.weights for side in (facts.a, facts.b))
    for name in {_tensor(c) for c in causes}:
        users = [n for n in nodes if _uses(n, name) and not (own_head and n.name == "lm_head" and "embed" in name)]
        if not users or any(_acts(n, found) for n in users):
            return True
    return False


def _uses(node: Node, tensor: str) -> bool:
    if tensor in node.weights or tensor.removesuffix(".bias") + ".weight" in node.weights:
        return True
    if node.kind == "rope" and ("inv_freq" in tensor or "rope_table" in tensor):
        return True
    layer = f"layers.{node.name.split('.')[0]}."
    if node.kind == "experts" and layer in tensor:
        return ".mlp." in tensor
    return node.name == "lm_head" and tensor == "model.embed_tokens.weight"


def _acts(node: Node, found: Walk) -> bool:
    if node.name not in found.distance or any(n not in found.distance for n in node.inputs):
        return True
    out = found.distance[node.name]
    known = ~out.isnan()
    before = torch.zeros(len(out))
    for name in node.inputs:
        before = torch.maximum(before, found.distance[name].nan_to_num(0.0))
    if not known.any() or not (out[known] > 0).any():
        return False
    alike = known & (before == 0.0)
    if not alike.any():  # nothing shows that it does not act, and numerics are not blamed before that
        return True
    if (out[alike] > 0).any():  # few rows may show it: those that a cast bias sends elsewhere, say
        return True
    return bool(out[known].quantile(0.9) > GROWTH * before[known].quantile(0.9))
