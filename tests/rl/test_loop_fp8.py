"""Whole runs in FP8: exact on both sides, resumable, auditable; and one-sided, labelled and corrected."""

import dataclasses
import json

import pytest

from tests.tiny_runs import lines, recipe, train, without_times
from zerogap.errors import ConfigError, ContractError
from zerogap.rl.loop import Run
from zerogap.rl.rollout_log import LoggedRollout, read_rollout, write_rollout
from zerogap.rl.run_folder import FACTS, RunFolder
from zerogap.verify.audit import audit_run

CALIBRATED = "numerics={preset: fp8-kv, kv_scale: calibrated}"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tmp_path_factory.mktemp("loop_fp8")


@pytest.fixture(scope="module")
def calibrated(base):
    return train(recipe(base, CALIBRATED, "checkpoint.every=1", "checkpoint.keep=9", "algorithm.beta=0.01"))


@pytest.mark.parametrize("numerics", ["fp8", "fp8-kv"])
def test_a_run_in_fp8_is_exact_and_its_audit_too(base, numerics):
    run = train(recipe(base, f"numerics={numerics}", name=numerics))
    assert run.mismatched_tokens == 0 < run.compared_tokens
    result = audit_run(run.folder.path)
    assert result.exact and result.tokens > 0


def test_calibrated_scales_change_with_every_version_and_the_audit_finds_them(calibrated):
    assert calibrated.mismatched_tokens == 0 < calibrated.compared_tokens
    names = [read_rollout(calibrated.folder.rollouts, step).samples[0].scale_set for step in (1, 2, 3)]
    assert len(set(names)) == 3
    assert all(0.0 < record["time/recalibrate"] < record["step_time"] for record in lines(calibrated, "metrics"))
    result = audit_run(calibrated.folder.path)
    assert result.exact and [w.version for w in result.weights] == [0, 2]


def test_an_audit_refuses_other_scales(calibrated, base):
    facts_file = calibrated.folder.saved_versions()[2] / FACTS
    whole = facts_file.read_text()
    facts = json.loads(whole)
    facts["kv_scales"][0][0][0] *= 2
    facts_file.write_text(json.dumps(facts))
    with pytest.raises(ContractError, match="KV scale set"):
        audit_run(calibrated.folder.path, [3])
    facts["kv_scales"] = None
    facts_file.write_text(json.dumps(facts))
    assert not audit_run(calibrated.folder.path, [3]).exact
    facts_file.write_text(whole)
    assert audit_run(calibrated.folder.path, [3]).exact


def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(calibrated, base):
    config = calibrated.config.model_copy(update={"output_dir": str(base / "resumed")})
    run = Run(config, str(calibrated.folder.checkpoints / "checkpoint-1"))
    assert run.train()
    assert run.decoder.digests() == calibrated.decoder.digests()
    ours, theirs = lines(run, "metrics"), lines(calibrated, "metrics")[1:]
    assert without_times(ours) == without_times(theirs)


def test_the_same_contract_in_other_words_resumes(calibrated, base):
    words = "numerics={preset: fp8-kv, kv_scale: calibrated, kv_margin: 2, scale_format: fp32}"
    config = recipe(base, words, "checkpoint.every=1", "checkpoint.keep=9", "algorithm.beta=0.01", name="other-words")
    Run(config, str(calibrated.folder.checkpoints / "checkpoint-1"))
    other = recipe(base, words.replace("margin: 2", "margin: 3"), "algorithm.beta=0.01", name="other-contract")
    with pytest.raises((ConfigError, ContractError), match="kv_margin"):
        Run(other, str(calibrated.folder.checkpoints / "checkpoint-1"))


def test_a_reference_model_keeps_the_scales_of_version_0(calibrated):
    assert calibrated.reference is not None
    first = read_rollout(calibrated.folder.rollouts, 1).samples[0].scale_set
    assert calibrated.reference.decoder.kv_scales.name == first != calibrated.decoder.kv_scales.name


def test_a_sample_of_another_scale_set_is_refused_by_the_audit(calibrated):
    logged = read_rollout(calibrated.folder.rollouts, 1)
    foreign = (dataclasses.replace(logged.samples[0], scale_set="0" * 16), *logged.samples[1:])
    write_rollout(calibrated.folder.rollouts, LoggedRollout(1, foreign, logged.rewards, logged.advantages))
    with pytest.raises(ContractError, match="0000000000000000"):
        audit_run(calibrated.folder.path, [1])
    write_rollout(calibrated.folder.rollouts, logged)


# ---- one-sided


@pytest.fixture(scope="module", params=["none", "token_tis"])
def one_sided(base, request):
    words = (f"algorithm.correction.kind={request.param}", "rollout.numerics={preset: fp8-kv, kv_scale: calibrated}")
    return train(recipe(base, *words, "checkpoint.every=1", "checkpoint.keep=9", name=f"one-sided-{request.param}"))


def test_a_one_sided_run_says_so_and_counts_what_differs(one_sided):
    records = lines(one_sided, "metrics")
    assert all(record["one_sided"] == 1.0 for record in records)
    assert one_sided.mismatched_tokens > 0 and max(r["bit_wise/logprob_diff/max"] for r in records) > 0.0
    assert all("time/old_logprobs" in record for record in records)
    kind = one_sided.config.algorithm.correction.kind
    corrected = [r.get("sampling/frac_modified_importance_sampling_ratio/mean") is not None for r in records]
    named = [any(key.startswith("sampling/frac_modified") for key in r) for r in records]
    assert all(n is (kind != "none") for n in named), corrected
    page = one_sided.folder.report.read_text()
    assert "not exact" in page and "One-sided" in page


def test_a_one_sided_run_cannot_be_audited(one_sided):
    with pytest.raises(ConfigError, match="nothing to audit: not exact"):
        audit_run(one_sided.folder.path)


def test_a_resumed_one_sided_run_has_the_same_bits(one_sided, base):
    config = one_sided.config.model_copy(update={"output_dir": str(base / f"resumed-{one_sided.folder.path.name}")})
    run = Run(config, str(one_sided.folder.checkpoints / "checkpoint-2"))
    assert run.train()
    assert run.decoder.digests() == one_sided.decoder.digests()
    assert without_times(lines(run, "metrics")) == without_times(lines(one_sided, "metrics"))[2:]


def test_both_sides_of_a_one_sided_run_have_the_same_published_weights(one_sided):
    assert one_sided.sampled is not one_sided.decoder
    for name, handle in one_sided.decoder.weights.items():
        assert one_sided.sampled.weights[name].value().equal(handle.value()), name
    assert RunFolder(one_sided.folder.path).config().one_sided
