"""Ids, definition, weights, cache: each check sees its planted fault and blames nothing that is clean."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from tests.diagnose.sides import LENGTHS, STATED, Told, facts, noisy, numbers, recorded, sequences, trace
from zerogap.diagnose.adapters.logprobs import defined_logprobs
from zerogap.diagnose.checks import cache, definition, ids, weights
from zerogap.diagnose.side import RecordedSide, Side
from zerogap.diagnose.sketch import sketch
from zerogap.diagnose.trace import Definition, Pass, SequenceTrace
from zerogap.diagnose.verdict import Finding

OPEN = Definition()


def run(check, a: Side, b: Side) -> Finding:
    return check.check(a, b, facts(a, b))


def names(finding: Finding) -> list[str]:
    return [c.name for c in finding.causes]


# ---------------------------------------------------------------------------------------------------- ids


def with_ids(change) -> RecordedSide:
    of, values = [], []
    for sequence, old in zip(sequences(), numbers(), strict=True):
        new, added = change(sequence.ids.tolist(), sequence.prompt_length)
        of.append(SequenceTrace(np.array(new, np.int32), sequence.prompt_length + added))
        values.append(np.resize(old, len(new)).astype(np.float32))
    return recorded(values, of=tuple(of), model={"bos_token_id": 1, "eos_token_id": [2]})


@pytest.mark.parametrize(
    ("expected", "change"),
    [
        ("ids/special_tokens", lambda i, p: ([1, *i], 1)),
        ("ids/special_tokens", lambda i, p: ([*i, 2], 0)),
        ("ids/special_tokens", lambda i, p: ([60, *i], 1)),
        ("ids/template", lambda i, p: ([*i[:2], 60, 61, 62, *i[2:]], 3)),
        ("ids/tokens", lambda i, p: ([*i[:-2], 60 + i[-2], i[-1]], 0)),
    ],
)
def test_unlike_ids_are_told_apart(expected, change):
    found = run(ids, recorded(), with_ids(change))
    assert found.outcome == "failed" and names(found) == [expected]


def test_the_same_ids_pass():
    assert run(ids, recorded(), recorded(noisy(numbers(), 0.1))).outcome == "passed"


def test_another_number_of_sequences():
    other = dataclasses.replace(trace(), sequences=sequences()[:2], passes=(Pass(numbers()[:2]),))
    assert names(run(ids, recorded(), RecordedSide(other))) == ["ids/tokens"]


# ---------------------------------------------------------------------------------------------------- definition


def moved(values, step: int):
    return tuple(np.roll(v, step) for v in values)


def ends_at(values, number: float):
    out = [v.copy() for v in values]
    for v in out:
        v[-1] = number
    return out


@pytest.mark.parametrize("noise", [0.0, 1e-3])
@pytest.mark.parametrize(
    ("expected", "change"),
    [
        ("definition/shift", lambda v: moved(v, -1)),
        ("definition/shift", lambda v: moved(v, 1)),
        ("definition/unit", lambda v: [-x for x in v]),
        ("definition/unit", lambda v: [x / math.log(2) for x in v]),
        ("definition/unit", lambda v: [np.exp(x) for x in v]),
        ("definition/eos", lambda v: ends_at(v, -9.0)),
        ("definition/eos", lambda v: ends_at(v, np.nan)),
    ],
)
def test_relations_between_arrays(expected, change, noise):
    values = noisy(numbers(), noise)
    for a, b in ((recorded(), recorded(change(values))), (recorded(change(values)), recorded())):
        found = run(definition, a, b)
        assert found.outcome == "failed" and names(found) == [expected], found


@pytest.mark.parametrize("step", [1, -1])
def test_a_shift_in_some_sequences(step):
    """As in packed rows whose first sample alone is scored in its place."""
    values = [v if i == 0 else np.roll(v, step) for i, v in enumerate(noisy(numbers(), 1e-3))]
    found = run(definition, recorded(), recorded(values))
    assert found.outcome == "failed" and names(found) == ["definition/shift"], found
    assert f"{len(values) - 1} of {len(values)} parts" in found.text


def test_a_shift_behind_a_packed_sample():
    """Positions start again inside a row; what follows is shifted."""
    of, values = [], []
    for sequence, old in zip(sequences(), numbers(), strict=True):
        cut = sequence.prompt_length + 2
        places = np.concatenate([np.arange(cut), np.arange(len(old) - cut)]).astype(np.int32)
        of.append(dataclasses.replace(sequence, positions=places))
        values.append(np.concatenate([old[:cut], np.roll(old[cut:], 1)]))
    found = run(definition, recorded(of=tuple(of)), recorded(values, of=tuple(of)))
    assert found.outcome == "failed" and names(found) == ["definition/shift"], found


@pytest.mark.parametrize("size", [1e-6, 1e-3, 0.1, 2.0])
def test_noise_is_no_definition(size):
    stated = run(definition, recorded(), recorded(noisy(numbers(), size)))
    assert stated.outcome == "passed"
    unknown = run(definition, recorded(definition=OPEN), recorded(noisy(numbers(), size), definition=OPEN))
    assert unknown.outcome == "not checked" and "lm_head" in unknown.needs


def test_one_odd_token_is_no_end_of_sequence():
    values = [v.copy() for v in numbers()]
    values[0][-1] = -9.0
    assert run(definition, recorded(), recorded(values)).outcome == "passed"


def logits(seed: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3.0 * torch.randn(sum(len(s.ids) for s in sequences()), 50, generator=generator)


def scored(rows: torch.Tensor, meaning: Definition, token=None) -> list[np.ndarray]:
    out, start = [], 0
    for sequence in sequences():
        own = rows[start : start + len(sequence.ids)]
        tokens = sequence.ids if token is None else np.concatenate([[0], token(own)[:-1].numpy()])
        out.append(defined_logprobs(tokens, own, meaning))
        start += len(sequence.ids)
    return out


MEANINGS = {
    "definition/temperature": Definition(0.7, True),
    "definition/kept_set": Definition(1.0, True, top_k=20),
}


@pytest.mark.parametrize("captured", ["a", "b", "both"])
@pytest.mark.parametrize("expected", list(MEANINGS))
def test_meanings_follow_from_logits(expected, captured):
    rows = logits()
    a, b = scored(rows, STATED), scored(rows, MEANINGS[expected])
    side_a = recorded(a, {"lm_head": rows} if captured != "b" else {}, OPEN)
    side_b = recorded(b, {"lm_head": rows} if captured != "a" else {}, MEANINGS[expected] if captured == "a" else OPEN)
    found = run(definition, side_a, side_b)
    assert found.outcome == "failed" and names(found) == [expected], found
    assert found.evidence["accounts"] is True


def test_raw_and_processed_at_one_temperature():
    rows = logits()
    raw, processed = Definition(0.7, False), Definition(0.7, True)
    a, b = recorded(scored(rows, raw), {"lm_head": rows}, raw), recorded(scored(rows, processed), {}, processed)
    assert names(run(definition, a, b)) == ["definition/processed"]


def test_stated_definitions_account_for_what_they_take_away():
    rows = logits()
    cold = Definition(0.7, True)
    a = recorded(scored(rows, STATED), {"lm_head": rows})
    for noise, accounts in ((0.1, True), (3.0, False)):
        other = rows + noise * logits(4)
        found = run(definition, a, recorded(scored(other, cold), {"lm_head": other}, cold))
        assert names(found) == ["definition/temperature"] and found.evidence["accounts"] is accounts, noise
    found = run(definition, recorded(), recorded(noisy(numbers(), 0.2), definition=cold))
    assert names(found) == ["definition/temperature"] and found.evidence["accounts"] is True  # nothing to score with


def test_the_likeliest_token_in_place_of_the_own():
    rows = logits()
    wrong = scored(rows, STATED, token=lambda own: own.argmax(-1))
    a, b = recorded(scored(rows, STATED), {"lm_head": rows}), recorded(wrong, {"lm_head": rows}, OPEN)
    assert names(run(definition, a, b)) == ["definition/wrong_token"]


def test_other_logits_are_no_other_definition():
    rows = logits()
    other = rows + 0.05 * logits(4)
    a = recorded(scored(rows, STATED), {"lm_head": rows})
    found = run(definition, a, recorded(scored(other, STATED), {"lm_head": other}))
    assert found.outcome == "passed", found


# ---------------------------------------------------------------------------------------------------- weights


def matrix(seed: int) -> torch.Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))


WEIGHTS = {"model.embed_tokens.weight": matrix(1), "model.layers.0.self_attn.q_proj.weight": matrix(2)}


def holding(**changes: torch.Tensor) -> Side:
    held = {n: changes.get(n.split(".")[-2], t) for n, t in WEIGHTS.items()}
    made = trace(noisy(numbers(), 0.1) if changes else None, weights={n: sketch(t) for n, t in held.items()})
    return RecordedSide(made)


def test_equal_weights_pass_and_a_transposed_one_is_named():
    assert run(weights, holding(), holding()).outcome == "passed"
    found = run(weights, holding(), holding(q_proj=matrix(2).T.contiguous()))
    assert names(found) == ["weights/transposed"] and found.evidence["accounts"] is True


def named(values, changed=()):
    """Sketches of as many matrices under these names; those of `changed` have other values."""
    held = {name: sketch(matrix(40 + i) + 0.01 * (name in changed) * matrix(90 + i)) for i, name in enumerate(values)}
    return recorded(noisy(numbers(), 0.1), weights=held)


def test_tensors_that_differ_alike_are_one_cause_with_their_names_and_their_place():
    names_of = [f"w.{i}" for i in range(9)]
    last = run(weights, named(names_of), named(names_of, names_of[-7:]))
    assert names(last) == ["weights/stale"] and last.text.startswith("7 of 9 ")
    assert "7 tensors in all: w.2, w.3, w.4, w.5, w.6, w.7 and 1 more" in last.causes[0].detail
    assert "the last 7 of 9 in recorded and sorted order" in last.causes[0].detail
    middle = run(weights, named(names_of), named(names_of, names_of[3:5])).causes[0].detail
    assert "2 tensors in all: w.3, w.4" in middle and "the last" not in middle


def test_names_with_nothing_in_common_are_said_once():
    other = run(weights, named(["a.0", "a.1"]), named(["b.0", "b.1"], ["b.1"]))
    assert other.outcome == "not checked" and "nothing in common (A: a.0; B: b.0)" in other.text
    same = run(weights, named(["a.0", "a.1"]), named(["b.0", "b.1"]))
    assert same.outcome == "passed" and "under other names" in same.text


def test_live_weights_are_compared_by_value():
    made = trace(weights={n: {} for n in ()})
    known = dataclasses.replace(made, weights={})
    stale = {**WEIGHTS, "model.layers.0.self_attn.q_proj.weight": matrix(2) + 0.01 * matrix(5)}
    rows = {f"0.{n}": torch.zeros(36, 8) for n in ("input_norm", "q_proj")}
    known = dataclasses.replace(known, passes=(dataclasses.replace(known.recorded, boundaries=rows),))
    moved_rows = {**rows, "0.q_proj": torch.ones(36, 8)}
    other = dataclasses.replace(known, passes=(Pass(noisy(numbers(), 0.1), definition=STATED, boundaries=moved_rows),))
    a, b = Told(known, lambda ask: None, WEIGHTS), Told(other, lambda ask: None, stale)
    found = run(weights, a, b)
    assert names(found) == ["weights/stale"] and found.evidence["accounts"] is True


@pytest.mark.parametrize(("noise", "moved", "accounts"), [(0.0, 0.0, False), (0.0, 0.1, True), (0.1, 0.1, True)])
def test_a_tensor_is_excused_only_where_its_operator_is_seen_not_to_act(noise, moved, accounts):
    """What it reads is the same or noisy, what it gives the same or moved; noise throughout excuses nothing."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(sum(LENGTHS), 8, generator=generator)
    weight = torch.randn(8, 8, generator=generator)
    name = "model.layers.0.self_attn.o_proj.weight"
    one = recorded(boundaries={"0.attention": rows, "0.o_proj": rows}, weights={name: sketch(weight)})
    parts = {"0.attention": rows + noise, "0.o_proj": rows + moved}
    other = recorded(noisy(numbers(), 0.1), boundaries=parts, weights={name: sketch(weight + 0.01)})
    assert run(weights, one, other).evidence["accounts"] is accounts


def test_no_weights_are_not_checked():
    found = run(weights, recorded(), recorded(noisy(numbers(), 0.1)))
    assert found.outcome == "not checked" and "digests" in found.needs


# ---------------------------------------------------------------------------------------------------- cache


def versions(values: list[int]) -> tuple[SequenceTrace, ...]:
    return tuple(
        dataclasses.replace(s, versions=np.full(len(s.ids), v, np.int64))
        for s, v in zip(sequences(), values, strict=True)
    )


def only_first(values):
    out = [v.copy() for v in values]
    out[0] = (out[0] - 0.3).astype(np.float32)
    return out


def test_tokens_of_an_older_version_account_for_what_only_they_show():
    a, b = recorded(of=versions([4, 4, 4])), recorded(only_first(numbers()), of=versions([3, 4, 4]))
    found = run(cache, a, b)
    assert names(found) == ["cache/stale_weights"] and found.evidence["accounts"] is True
    everywhere = recorded(noisy(numbers(), 0.3), of=versions([3, 4, 4]))
    assert run(cache, a, everywhere).evidence["accounts"] is False


def test_versions_that_agree_pass():
    a, b = recorded(of=versions([4, 4, 4])), recorded(noisy(numbers(), 0.1), of=versions([4, 4, 4]))
    assert run(cache, a, b).outcome == "passed"
    assert run(cache, recorded(), recorded(noisy(numbers(), 0.1))).outcome == "not checked"


def test_a_hit_length_on_one_side_says_nothing_of_versions():
    of = tuple(dataclasses.replace(s, hit_length=2) for s in sequences())
    found = run(cache, recorded(of=of), recorded(noisy(numbers(), 0.1)))
    assert found.outcome == "not checked" and "version of every token" in found.needs
    half = run(cache, recorded(of=versions([4, 4, 4])), recorded(noisy(numbers(), 0.1)))
    assert half.outcome == "not checked" and "side B does not say" in half.text


def test_older_versions_are_not_to_blame_where_a_whole_pass_gives_the_same_bits():
    values = only_first(numbers())
    again = Pass(tuple(values), "whole", ((0,), (1,), (2,)), STATED)
    stale = {"of": versions([3, 4, 4]), "path": "decode"}
    assert run(cache, recorded(values, **stale), recorded()).evidence["accounts"] is True
    found = run(cache, recorded(values, more=[again], **stale), recorded())
    assert names(found) == ["cache/stale_weights"] and found.evidence["accounts"] is False
    other = dataclasses.replace(again, logprobs=tuple(numbers()))
    assert run(cache, recorded(values, more=[other], **stale), recorded()).evidence["accounts"] is True


@pytest.mark.parametrize(
    ("expected", "fact"),
    [
        ("cache/positions", {"positions": lambda s: np.arange(len(s.ids), dtype=np.int32) + 1}),
        ("cache/scales", {"scale_set": lambda s: "b"}),
        ("cache/wrong_prefix", {"hit_length": lambda s: 2}),
    ],
)
def test_positions_scales_and_prefixes(expected, fact):
    ((name, make),) = fact.items()
    base = tuple(dataclasses.replace(s, scale_set="a", hit_length=0) for s in sequences())
    of = (dataclasses.replace(base[0], **{name: make(base[0])}), *base[1:])
    found = run(cache, recorded(of=base), recorded(only_first(numbers()), of=of))
    assert names(found) == [expected] and found.evidence["accounts"] is True
