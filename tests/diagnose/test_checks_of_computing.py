"""Rerun, neighbours, path, layout, operators, routing: each check sees its planted fault and blames nothing clean."""

import dataclasses

import numpy as np
import pytest
import torch

from tests.diagnose.sides import STATED, Told, facts, noisy, numbers, recorded, sequences, trace
from tests.tiny import tiny_decoder
from zerogap.diagnose.bisect import nodes_of, walk
from zerogap.diagnose.checks import layout, neighbours, operators, path, rerun, routing
from zerogap.diagnose.side import Ask, RecordedSide, Side
from zerogap.diagnose.trace import Pass
from zerogap.diagnose.verdict import Finding
from zerogap.diagnose.zerogap_side import ZerogapSide
from zerogap.types import ForwardContext
from zerogap.verify.faulty_layers import FaultyBlock, decodes

OTHER = noisy(numbers(), 0.2, seed=5)


def run(check, a: Side, b: Side) -> Finding:
    return check.check(a, b, facts(a, b))


def names(finding: Finding) -> list[str]:
    return [c.name for c in finding.causes]


def answering(values, boundaries=None, **facts_) -> Told:
    """A live side that gives `values(ask)`."""

    def answer(ask: Ask) -> Pass:
        return Pass(tuple(values(ask)), ask.path, ask.batches, ask.definition or STATED, boundaries or {})

    made = trace(values(Ask(batches=((0,), (1,), (2,)))), boundaries, **facts_)
    return Told(made, answer)


# ---------------------------------------------------------------------------------------------------- rerun


def test_a_side_that_never_repeats_itself():
    generator = np.random.default_rng(0)
    shaky = answering(lambda ask: noisy(numbers(), 0.2, seed=int(generator.integers(1 << 30))))
    found = run(rerun, recorded(), shaky)
    assert names(found) == ["rerun/nondeterministic"] and found.evidence["accounts"] is True


def test_tiny_noise_of_one_side_does_not_account_for_a_large_difference():
    generator = np.random.default_rng(0)
    shaky = answering(lambda ask: noisy(OTHER, 1e-5, seed=int(generator.integers(1 << 30))))
    assert run(rerun, recorded(), shaky).evidence["accounts"] is False


def test_sides_that_repeat_themselves_pass_and_recorded_ones_are_not_checked():
    assert run(rerun, answering(lambda ask: numbers()), answering(lambda ask: OTHER)).outcome == "passed"
    found = run(rerun, recorded(), recorded(OTHER))
    assert found.outcome == "not checked" and found.needs


def test_a_warm_up_capture_is_set_aside():
    rows = {"0.q_proj": torch.ones(36, 4)}
    side = answering(lambda ask: OTHER, rows)
    first = dataclasses.replace(side.trace.recorded, boundaries={"0.q_proj": torch.zeros(36, 4)})
    side.trace = dataclasses.replace(side.trace, passes=(first,))
    known = facts(recorded(), side)
    assert rerun.check(known.a, known.b, known).outcome == "passed"
    assert known.answers["b"].boundaries["0.q_proj"].all() and "set aside" in known.notes[0]


def test_recorded_reruns():
    again = Pass(noisy(OTHER, 0.2, seed=9), "whole", ((0,), (1,), (2,)), STATED)
    assert names(run(rerun, recorded(), recorded(OTHER, more=(again,)))) == ["rerun/nondeterministic"]
    same = dataclasses.replace(again, logprobs=OTHER)
    assert run(rerun, recorded(), recorded(OTHER, more=(same,))).outcome == "passed"


# ---------------------------------------------------------------------------------------------------- neighbours


def seeing(what):
    """Log-probs that depend on the company: `what(ask)` is added to sequences in that company."""
    return answering(lambda ask: [(v + np.float32(what(ask))).astype(np.float32) for v in numbers()])


def alone(ask: Ask) -> bool:
    return not ask.neighbours and all(len(b) == 1 for b in ask.batches or ((0,),))


COMPANY = {
    "neighbours/content": lambda ask: sum(sum(n) % 7 for n in ask.neighbours) * 0.01,
    "neighbours/row": lambda ask: 0.1 * (len(ask.batches or ()) == 1 and (ask.batches or ((0,),))[0][0] != 0),
    "neighbours/batch_size": lambda ask: 0.0 if alone(ask) else 0.1,
    "neighbours/padding": lambda ask: 0.1 * any(len(n) > 15 for n in ask.neighbours),
}


@pytest.mark.parametrize("expected", list(COMPANY))
def test_company_that_changes_a_bit(expected):
    found = run(neighbours, recorded(OTHER), seeing(COMPANY[expected]))
    assert found.outcome == "failed" and names(found) == [expected]
    assert found.evidence["accounts"] is False  # the sides differ as much without company


LARGE = {"num_hidden_layers": 30, "hidden_size": 576}


@pytest.mark.parametrize("expected", list(COMPANY))
def test_a_large_model_is_searched_less_for_the_same_kinds(expected):
    side = seeing(COMPANY[expected])
    side.trace = dataclasses.replace(side.trace, model=LARGE)
    assert names(run(neighbours, recorded(OTHER), side)) == [expected]


@pytest.mark.parametrize(("device", "batches"), [("cpu", 9), ("cuda:0", 17)])
def test_batches_of_a_large_model(device, batches):
    side = answering(lambda ask: OTHER)
    side.trace = dataclasses.replace(side.trace, model=LARGE, layout={"device": device})
    assert f"side B, {batches} batches" in run(neighbours, recorded(), side).text


def test_company_accounts_for_the_difference_if_alone_the_sides_agree():
    together = ((0, 1, 2),)
    side = seeing(COMPANY["neighbours/batch_size"])
    side.trace = dataclasses.replace(side.trace, passes=(side.answer(Ask(batches=together)),))
    found = run(neighbours, recorded(), side)
    assert names(found) == ["neighbours/batch_size"] and found.evidence["accounts"] is True


def test_no_company_changes_a_bit():
    found = run(neighbours, recorded(), answering(lambda ask: OTHER))
    assert found.outcome == "passed" and "17 batches" in found.text
    alone = run(neighbours, recorded(), recorded(OTHER))
    assert alone.outcome == "not checked" and "no company exists" in alone.text and not alone.needs


# ---------------------------------------------------------------------------------------------------- path


def test_the_path_accounts_for_the_difference_if_by_the_same_one_the_sides_agree():
    side = answering(lambda ask: OTHER if ask.path == "decode" else numbers())
    side.trace = dataclasses.replace(side.trace, passes=(side.answer(Ask("decode", ((0,), (1,), (2,)))),))
    found = run(path, recorded(), side)
    assert names(found) == ["path/decode"] and found.evidence["accounts"] is True


def test_paths_that_agree_are_not_blamed():
    side = answering(lambda ask: OTHER)
    side.trace = dataclasses.replace(side.trace, passes=(side.answer(Ask("decode", ((0,), (1,), (2,)))),))
    assert run(path, recorded(), side).outcome == "passed"
    assert run(path, recorded(), recorded(OTHER, path="decode")).outcome == "not checked"
    assert run(path, recorded(), recorded(OTHER)).outcome == "passed"


def test_a_decoder_that_is_wrong_while_decoding():
    ids = np.random.default_rng(0).integers(0, 500, 30).tolist()
    clean, faulty = tiny_decoder(), tiny_decoder()

    def rows(context: ForwardContext) -> list[int]:
        return list(range(len(context.positions))) if decodes(context) else []

    faulty.blocks[1] = FaultyBlock(faulty.blocks[1], rows)  # type: ignore[call-overload]
    a = ZerogapSide(faulty, [ids], prompt_lengths=[20], path="decode")
    b = ZerogapSide(clean, [ids], prompt_lengths=[20])
    found = run(path, a, b)
    assert names(found)[-1] == "path/decode" and found.evidence["accounts"] is True
    assert run(path, ZerogapSide(clean, [ids], prompt_lengths=[20], path="decode"), b).outcome == "not checked"  # equal


def test_a_thorough_diagnosis_asks_live_sides_for_every_path():
    ids = np.random.default_rng(0).integers(0, 500, 30).tolist()
    clean, faulty = tiny_decoder(), tiny_decoder()
    faulty.blocks[1] = FaultyBlock(  # type: ignore[call-overload]
        faulty.blocks[1], lambda context: list(range(len(context.positions))) if decodes(context) else []
    )
    side = ZerogapSide(clean, [ids], prompt_lengths=[20])
    for decoder, outcome in ((clean, "passed"), (faulty, "failed")):
        known = facts(side, ZerogapSide(decoder, [ids], prompt_lengths=[20]))
        known.thorough = True
        found = path.check(known.a, known.b, known)
        assert found.outcome == outcome, found
    assert names(found)[-1] == "path/decode" and found.evidence["accounts"] is False


# ---------------------------------------------------------------------------------------------------- layout


def test_layouts():
    rows = {n: torch.ones(36, 4) for n in ("0.attention", "0.o_proj")}
    apart = {**rows, "0.o_proj": torch.ones(36, 4) * 1.01}
    early = {**apart, "0.attention": torch.ones(36, 4) * 1.01}
    one, two = {"tensor_parallel_size": 1}, {"tensor_parallel_size": 2}
    found = run(layout, recorded(boundaries=rows, layout=one), recorded(OTHER, apart, layout=two))
    assert names(found) == ["layout/ranks"] and found.evidence["accounts"] is True
    found = run(layout, recorded(boundaries=rows, layout=one), recorded(OTHER, early, layout=two))
    assert found.evidence["accounts"] is False
    assert run(layout, recorded(layout=one), recorded(OTHER, layout=one)).outcome == "passed"
    assert run(layout, recorded(), recorded(OTHER)).outcome == "not checked"


# ---------------------------------------------------------------------------------------------------- operators


def chain(change: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """Boundaries of one layer with other numbers everywhere."""
    generator = torch.Generator().manual_seed(4)
    wanted = [n.name for n in nodes_of(["0.q_proj", "final_norm"])]
    rows = {n: torch.randn(36, 6, generator=generator) for n in wanted if n not in ("lm_head", "logprob")}
    return {**rows, **(change or {})}


def scaled(*wanted: str, by: float = 1.5) -> dict[str, torch.Tensor]:
    rows = chain()
    return {n: rows[n] * by for n in wanted}


def test_the_first_operator_with_equal_inputs_is_named_and_what_follows_is_not():
    later = ("0.o_proj", "0.residual_attention", "0.post_norm", "0.gate_proj", "0.up_proj", "0.activation")
    later = (*later, "0.down_proj", "0.residual_mlp", "final_norm")
    found = run(operators, recorded(boundaries=chain()), recorded(OTHER, chain(scaled(*later))))
    assert found.outcome == "failed" and found.evidence["first"] == "0.o_proj"
    assert found.causes[0].subject == "linear" and found.evidence["diverging"] == ["0.o_proj"]


def test_attention_reads_earlier_rows():
    rows = chain()
    keys, out = rows["0.k_rope"].clone(), rows["0.attention"].clone()
    keys[2] += 1.0
    out[2:12] += 1.0  # the first sequence has 12 rows
    found = walk(
        *(Pass(numbers(), boundaries=b) for b in (rows, chain({"0.k_rope": keys, "0.attention": out}))), (12, 9, 15)
    )
    assert [d.node.name for d in found.diverging] == ["0.k_rope"]
    out = out.clone()
    out[20] += 1.0
    found = walk(
        *(Pass(numbers(), boundaries=b) for b in (rows, chain({"0.k_rope": keys, "0.attention": out}))), (12, 9, 15)
    )
    assert [d.node.name for d in found.diverging] == ["0.k_rope", "0.attention"]
    assert found.diverging[1].rows.nonzero().tolist() == [[20]]


def test_operators_that_were_not_recorded_are_not_named():
    a, b = chain(), chain(scaled("0.attention", "0.o_proj", "0.residual_attention", "0.post_norm", "final_norm"))
    for name in ("0.q_rope", "0.k_rope"):
        del a[name], b[name]
    found = run(operators, recorded(boundaries=a), recorded(OTHER, b))
    assert found.outcome == "failed" and names(found) == ["unattributed/unattributed"] and "0.q_rope" in found.needs


@pytest.mark.parametrize("kind", ["zeros", "another", "unlike shape"])
def test_what_is_no_output_is_set_aside(kind):
    rows = chain()
    wrong = {
        "zeros": torch.zeros(36, 6),
        "another": rows["0.residual_attention"].clone(),
        "unlike shape": torch.ones(36, 2),
    }[kind]
    known = facts(recorded(boundaries=rows), recorded(boundaries=chain({"0.post_norm": wrong})))
    known.thorough = True
    found = operators.check(known.a, known.b, known)
    assert found.outcome == "passed" and any("0.post_norm" in note for note in known.notes)


def test_what_is_set_aside_is_blamed_after_all_if_the_next_operator_needs_it():
    rows = chain()
    skipped = chain({"0.residual_mlp": rows["0.down_proj"].clone(), **scaled("final_norm")})
    found = run(operators, recorded(boundaries=rows), recorded(OTHER, skipped))
    assert found.evidence["first"] == "0.residual_mlp" and found.causes[0].subject == "residual"


def test_a_large_step_behind_noise_decides():
    rows = chain()
    noise = {n: t * (1 + 1e-3) for n, t in rows.items()}
    far = {n: noise[n] * 2 for n in list(rows)[list(rows).index("0.down_proj") :]}
    found = run(operators, recorded(boundaries=rows), recorded(OTHER, {**noise, **far}))
    assert found.evidence["first"] == "0.down_proj"


def test_equal_boundaries_pass_and_missing_ones_are_not_checked():
    known = facts(recorded(boundaries=chain()), recorded(boundaries=chain()))
    known.thorough = True
    assert operators.check(known.a, known.b, known).outcome == "passed"
    found = run(operators, recorded(boundaries=chain()), recorded(OTHER, chain()))
    assert (
        names(found) == ["unattributed/unattributed"] and "lm_head" in found.needs
    )  # equal up to there, and it was not recorded
    assert run(operators, recorded(), recorded(OTHER, chain())).outcome == "not checked"


# ---------------------------------------------------------------------------------------------------- routing


def routed(change=None, margin: float = 0.01):
    of = []
    for i, sequence in enumerate(sequences()):
        experts = np.tile(np.array([[1, 3]], np.int16), (len(sequence.ids), 2, 1))
        margins = np.full((len(sequence.ids), 2), margin, np.float32)
        if change is not None:
            change(i, experts)
        of.append(dataclasses.replace(sequence, experts=experts, margins=margins))
    return tuple(of)


def flip(i: int, experts: np.ndarray) -> None:
    if i == 0:
        experts[5, 1] = (1, 4)


def test_flipped_experts():
    values = [v.copy() for v in numbers()]
    values[0][6] -= 1.0
    found = run(routing, recorded(of=routed()), recorded(values, of=routed(flip)))
    assert names(found) == ["routing/near_tie"] and found.evidence["accounts"] is None
    found = run(routing, recorded(of=routed()), recorded(OTHER, of=routed(flip)))
    assert found.evidence["accounts"] is False  # other tokens hold the difference
    found = run(routing, recorded(of=routed(margin=0.0)), recorded(values, of=routed(flip, 0.0)))
    assert names(found) == ["router/tie_rule"] and found.evidence["accounts"] is True


def test_the_same_experts_pass_in_any_order():
    def turned(i: int, experts: np.ndarray) -> None:
        experts[:] = experts[..., ::-1].copy()

    assert run(routing, recorded(of=routed()), recorded(OTHER, of=routed(turned))).outcome == "passed"
    assert run(routing, recorded(), RecordedSide(trace(OTHER))).outcome == "not checked"


def test_further_tensors_of_the_layer_are_said_and_an_unattributed_operator_asks_for_its_weights():
    rows = {name: torch.full((36, 4), 1.0 + i) for i, name in enumerate(("embed", "0.input_norm", "0.inner"))}
    apart = {**rows, "0.input_norm": torch.full((36, 4), 2.5), "0.inner": torch.full((36, 4), 3.5)}
    found = run(operators, recorded(boundaries=rows), recorded(OTHER, apart))
    assert "further tensors of its layer: 0.inner differs" in found.text
    assert "weights that 0.input_norm computes with" in found.needs
