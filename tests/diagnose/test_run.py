"""A whole diagnosis: which check decides, what is further, what to do next; shares; public name and files."""

import dataclasses
import json

import numpy as np
import pytest
import torch

import zerogap as zg
from tests.diagnose.sides import LENGTHS, OPEN, STATED, facts, noisy, numbers, recorded, trace
from tests.tiny import tiny_decoder
from zerogap.diagnose.run import CHECKS, decide
from zerogap.diagnose.trace import Definition, Pass, save_trace
from zerogap.diagnose.verdict import UNKNOWN, Cause, Finding
from zerogap.diagnose.zerogap_side import ZerogapSide
from zerogap.errors import CheckpointError, ConfigError
from zerogap.types import SamplingKey, SamplingParams

OTHER = noisy(numbers(), 0.2)
STALE, SPLIT = Cause("weights", "stale", "a tensor"), Cause("attention", "split", "a node")
VAGUE = Cause("linear", "unattributed")


def failed(check: str, cause: Cause, accounts: bool | None) -> Finding:
    return Finding(check, "failed", "", (cause,), evidence={"accounts": accounts})


@pytest.mark.parametrize(
    ("findings", "check", "cause"),
    [
        ([failed("weights", STALE, True), failed("operators", SPLIT, True)], "weights", STALE),
        ([failed("weights", STALE, False), failed("operators", SPLIT, True)], "operators", SPLIT),
        ([failed("weights", STALE, None), failed("operators", SPLIT, True)], "operators", SPLIT),
        ([failed("weights", STALE, None), failed("operators", VAGUE, True)], "weights", STALE),
        ([failed("operators", VAGUE, True)], "operators", VAGUE),
        ([failed("weights", STALE, False)], "weights", UNKNOWN),
        ([], "", UNKNOWN),
    ],
)
def test_who_decides(findings, check, cause):
    verdict = decide(findings, facts(recorded(), recorded(OTHER)))
    assert (verdict.same, verdict.check, verdict.cause) == (False, check, cause) and verdict.next_step
    others = {f.causes[0].name for f in findings} - {cause.name}
    assert {c.name for c in verdict.further} == others


def test_equal_numbers_have_no_cause_whatever_else_differs():
    verdict = decide([failed("weights", STALE, False)], facts(recorded(), recorded()))
    assert verdict.same and verdict.cause is None and verdict.further == (STALE,)


def test_equal_traces():
    report = zg.diagnose(trace(), trace())
    assert report.verdict.same and [f.check for f in report.findings] == [name for name, _ in CHECKS]
    assert report.statistics["different"] == 0 and not report.worst and not report.shares


def test_two_arrays_say_what_they_can_and_what_is_missing():
    report = zg.diagnose(trace(definition=OPEN), trace(OTHER, definition=OPEN))
    assert report.verdict.cause == UNKNOWN and "log-probs mean" in report.verdict.next_step
    assert all(f.outcome != "failed" for f in report.findings)
    unchecked = [f for f in report.findings if f.outcome == "not checked"]
    assert {"definition", "weights", "operators", "rerun"} <= {f.check for f in unchecked}
    assert report.statistics["count"] == 24 and len(report.worst) == 20
    shifted = zg.diagnose(trace(definition=OPEN), trace([-v for v in numbers()], definition=OPEN))
    assert shifted.verdict.cause is not None and shifted.verdict.cause.name == "definition/unit"
    assert shifted.shares[0].part == "definition" and shifted.shares[0].share == 1.0


def test_folders_of_traces_and_json(tmp_path):
    a, b = save_trace(trace(), tmp_path / "a"), save_trace(trace(OTHER), tmp_path / "b")
    report = zg.diagnose(a, str(b))
    facts_ = json.loads(json.dumps(report.as_json(), allow_nan=False))
    assert facts_["verdict"]["cause"]["name"] == "unattributed/unattributed"
    assert facts_["statistics"]["count"] == 24 and len(facts_["findings"]) == len(CHECKS)
    with pytest.raises(CheckpointError):
        zg.diagnose(a, tmp_path / "nothing")


def test_other_tokens_end_the_diagnosis():
    one = trace()
    ids = [dataclasses.replace(s, ids=np.append(s.ids[:-1], 49).astype(np.int32)) for s in one.sequences]
    report = zg.diagnose(one, trace(of=tuple(ids)))
    assert report.verdict.check == "ids" and not report.verdict.same
    assert all(f.outcome == "not checked" for f in report.findings[1:])


def test_a_rollout_of_zerogap_against_its_trainer_is_the_same():
    decoder = tiny_decoder("qwen3_moe")
    params = SamplingParams(temperature=0.7, max_tokens=8, stop_token_ids=())
    prompts = [[5, 6, 7, 8], [9, 10, 11]]
    samples = zg.Engine(decoder).generate(prompts, params, [SamplingKey(seed=i) for i in range(2)])
    ids = [[*s.prompt_ids.tolist(), *s.completion_ids.tolist()] for s in samples]
    recorded_ = [
        np.concatenate([np.full(len(s.prompt_ids), np.nan, np.float32), s.logprobs]).astype(np.float32) for s in samples
    ]
    meaning = dataclasses.replace(STATED, temperature=0.7)
    lengths = [len(p) for p in prompts]
    rollout = ZerogapSide(
        decoder, ids, prompt_lengths=lengths, definition=meaning, path="decode", recorded=recorded_, name="rollout"
    )
    trainer = ZerogapSide(decoder, ids, prompt_lengths=lengths, definition=meaning, name="trainer")
    report = zg.diagnose(rollout, trainer, thorough=True)
    assert report.verdict.same and report.statistics["count"] == 16
    assert all(f.outcome != "failed" for f in report.findings), [f for f in report.findings if f.outcome == "failed"]
    assert report.heat is not None and not any(any(row) for row in report.heat.differing)
    raw = ZerogapSide(decoder, ids, prompt_lengths=lengths, name="raw")
    verdict = zg.diagnose(rollout, raw).verdict
    assert verdict.cause is not None and verdict.cause.subject == "definition"


def test_an_operator_that_differs_is_named_and_its_rows_are_on_the_map():
    decoder = tiny_decoder()
    ids = [np.random.default_rng(i).integers(0, 500, 20).tolist() for i in range(2)]

    def disturb(name, outputs, info):
        if name == "silu_mul":
            outputs["out"][:, 0] += torch.ones(()).bfloat16()

    clean, faulty = ZerogapSide(decoder, ids), ZerogapSide(decoder, ids, disturb=disturb)
    report = zg.diagnose(clean, faulty)
    assert report.verdict.check == "operators" and report.verdict.cause is not None
    assert report.verdict.cause.subject == "activation" and report.verdict.cause.field == "unattributed"
    assert report.attributions[0].node == "0.activation" and report.attributions[0].share_a == 1.0
    assert report.attributions[0].variant_b == ""  # no form of it gives these rows
    assert report.heat is not None
    rows = dict(zip(report.heat.nodes, report.heat.differing, strict=True))
    assert not any(rows["0.up_proj"]) and all(rows["0.activation"])


FOREIGN = {"layers.0.attention.q": 8, "layers.0.moe.experts": 8, "final_norm": 8, "head": 50}
OURS = {"embed": 8, "0.experts": 8, "0.residual_mlp": 8, "final_norm": 8, "lm_head": 50}


@pytest.mark.parametrize("names", [(FOREIGN, FOREIGN), (FOREIGN, OURS), (OURS, FOREIGN), ({"logprob": 1}, FOREIGN)])
def test_boundaries_of_other_names_are_compared_by_name_and_blame_nothing(names):
    rows = sum(LENGTHS)

    def boundaries(widths, seed):
        generator = torch.Generator().manual_seed(seed)
        return {name: torch.randn(rows, width, generator=generator) for name, width in widths.items()}

    sides = [recorded(numbers(i), boundaries(of, i)) for i, of in enumerate(names)]
    report = zg.diagnose(*sides)
    assert not report.verdict.same and report.verdict.check
    assert all(found.cause.subject == "unattributed" for found in report.attributions)


def test_boundaries_of_a_further_pass_are_compared():
    """An engine's own numbers first, without boundaries, then the same sequences in a whole pass, with them."""
    rows, generator = sum(LENGTHS), torch.Generator().manual_seed(0)
    embed = torch.randn(rows, 8, generator=generator)
    whole = Pass(tuple(numbers()), "whole", ((0,), (1,), (2,)), STATED, {"embed": embed})
    engine = recorded(numbers(), path="decode", more=[whole])
    trainer = recorded(noisy(numbers(), 0.1), {"embed": embed})
    found = {f.check: f for f in zg.diagnose(engine, trainer).findings}
    assert found["operators"].evidence["compared"] == 2, "embed and the log-probs"


def test_a_definition_that_explains_all_leaves_the_path_unblamed():
    """Raw numbers that are declared processed, and a whole pass that really is."""
    decoder = tiny_decoder()
    ids = [np.random.default_rng(i).integers(0, 500, 30).tolist() for i in range(2)]
    sides = [
        ZerogapSide(decoder, ids, definition=Definition(t, processed, 0, 1.0, 0.0), path=path)
        for t, processed, path in ((0.7, False, "decode"), (0.7, True, "whole"))
    ]
    raw, processed = (side.trace for side in sides)
    lied = dataclasses.replace(raw.recorded, definition=processed.recorded.definition, boundaries={})
    a = dataclasses.replace(raw, passes=(lied, dataclasses.replace(processed.recorded, path="whole")))
    verdict = zg.diagnose(a, processed).verdict
    assert verdict.cause is not None and verdict.cause.subject == "definition"
    assert all(cause.subject != "path" for cause in verdict.further)


def test_nothing_to_compare_is_no_difference():
    masked = tuple(dataclasses.replace(s, mask=np.zeros(len(s.ids), bool)) for s in trace().sequences)
    with pytest.raises(ConfigError, match="check the masks"):
        zg.diagnose(trace(of=masked), trace(of=masked))
