"""Runs of a mixture-of-experts model: what is recorded, logged, trained and audited, and what is refused."""

import dataclasses
import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.bits import assert_same_bits
from tests.models_on_disk import tiny_spec
from tests.tiny_runs import VOCAB, lines, recipe, train, without_times
from zerogap.errors import CheckpointError, ConfigError
from zerogap.models.moe_spec import MoESpec
from zerogap.ops.moe import Routing
from zerogap.rl.dictionary import find
from zerogap.rl.loop import Run
from zerogap.rl.rollout_log import LoggedRollout, read_rollout, write_rollout
from zerogap.text.byte_level import END, write_byte_tokenizer
from zerogap.train.checkpoint import list_checkpoints
from zerogap.verify.audit import audit_run
from zerogap.weights.random_model import write_random_model

ON = ("moe.record_routing=true", "moe.balance_loss=0.01")
NAMES = {"load_max", "idle_experts", "margin_min", "margin_p01", "balance_loss", "different_experts"}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tmp_path_factory.mktemp("moe")


@pytest.fixture(scope="module")
def finished(base):
    return train(recipe(base, *ON, "logging.audit_every=1", "checkpoint.every=1", family="qwen3_moe"))


def test_every_step_compares_experts_and_logs_loads(finished):
    for record in lines(finished, "metrics"):
        moe = {name.removeprefix("moe/"): value for name, value in record.items() if name.startswith("moe/")}
        assert set(moe) == NAMES and all(find(f"moe/{name}") is not None for name in moe)
        assert moe["different_experts"] == 0 and record["bit_wise/mismatched_tokens"] == 0
        assert 1 <= moe["load_max"] <= 6 / 2 and 0 < moe["margin_min"] <= moe["margin_p01"]
        assert moe["balance_loss"] > 0.9


def with_expert(sample, expert):
    """The sample as if its last token had gone to an expert of that number."""
    experts = sample.routing.experts.copy()
    experts[-1, -1, -1] = expert
    return dataclasses.replace(sample, routing=dataclasses.replace(sample.routing, experts=experts))


def test_logged_traces_are_those_of_the_engine(finished, tmp_path):
    rollout = read_rollout(finished.folder.rollouts, 2)
    spec = finished.decoder.spec
    arrays = load_file(finished.folder.rollouts / "step-2.safetensors")
    assert arrays["routing_experts"].dtype == np.int8
    for sample in rollout.samples:
        assert sample.routing.experts.shape == (sample.num_tokens - 1, spec.num_layers, spec.moe.top_k)
        assert sample.routing.recorded[len(sample.prompt_ids) :].all()
    wide = [with_expert(s, 300) if i == 1 else s for i, s in enumerate(rollout.samples)]
    wide[3].routing.experts[:5] = -1  # as a prefix hit leaves it
    wide[2] = dataclasses.replace(wide[2], routing=None)
    write_rollout(tmp_path, LoggedRollout(7, tuple(wide), rollout.rewards, rollout.advantages))
    assert load_file(tmp_path / "step-7.safetensors")["routing_experts"].dtype == np.int16
    for ours, theirs in zip(read_rollout(tmp_path, 7).samples, wide, strict=True):
        assert (ours.routing is None) == (theirs.routing is None)
        if ours.routing is not None:
            assert_same_bits(ours.routing.experts, theirs.routing.experts, "experts")
            assert_same_bits(ours.routing.margins, theirs.routing.margins, "margins")


def test_the_audit_checks_experts(finished):
    result = audit_run(finished.folder.path, [1, 3])
    assert result.exact
    recorded = {n: read_rollout(finished.folder.rollouts, n).samples for n in (1, 3)}
    for step in result.steps:
        assert step.routed == sum(int(s.routing.recorded.sum()) for s in recorded[step.step]) > 0
        assert step.experts == 0


@pytest.mark.parametrize("name", ["routing_experts", "routing_margins"])
def test_a_changed_trace_is_red_in_the_audit(finished, name):
    path = finished.folder.rollouts / "step-2.safetensors"
    kept = path.read_bytes()
    arrays = load_file(path)
    values = arrays[name]
    token = len(values) - 1  # of the last sample's completion
    values.view(np.int32 if name == "routing_margins" else np.int8)[token].reshape(-1)[0] ^= 1
    save_file(arrays, path)
    try:
        (step,) = audit_run(finished.folder.path, [2]).steps
    finally:
        path.write_bytes(kept)
    assert (step.trainer, step.engine, step.redrawn, step.experts) == (0, 0, 0, 2)
    assert step.first.startswith("experts, trainer: sample 11, token ")


def erase(arrays, rows):
    arrays["routing_experts"][rows] = -1


def cut(arrays, name, change):
    arrays[name] = np.ascontiguousarray(change(arrays[name]))


@pytest.fixture
def changed(finished):
    """Changes step 2's files until the test is over: its arrays and the facts of its samples."""
    path = finished.folder.rollouts / "step-2.safetensors"
    kept = {file: file.read_bytes() for file in (path, path.with_suffix(".json"))}

    def change(arrays=None, facts=None):
        if arrays is not None:
            values = load_file(path)
            arrays(values)
            save_file(values, path)
        if facts is not None:
            content = json.loads(path.with_suffix(".json").read_text())
            facts(content["samples"])
            path.with_suffix(".json").write_text(json.dumps(content))

    yield change
    for file, content in kept.items():
        file.write_bytes(content)


@pytest.mark.parametrize("first", [-1, -5, 0])
def test_an_erased_trace_is_red_in_the_audit(finished, changed, first):
    """The last token of the last sample, its five last, or all of all samples: none may have come from a cache."""
    changed(lambda arrays: erase(arrays, slice(first, None)))
    (step,) = audit_run(finished.folder.path, [2]).steps
    samples = read_rollout(finished.folder.rollouts, 2).samples
    after = sum(s.num_tokens - len(s.prompt_ids) for s in samples)  # beginnings of prompts may be prefix hits
    assert step.experts == (-first or after) and step.first.startswith("experts, record: sample ")


def test_a_trace_that_is_said_not_to_exist_is_red_in_the_audit(finished, changed):
    """The run's own metrics say that experts were compared."""

    def forget(samples):
        for sample in samples:
            sample["routing"] = False

    changed(facts=forget)
    result = audit_run(finished.folder.path, [2])
    assert result.steps[0].routed == 0 < result.steps[0].experts and not result.exact


def test_prefix_hits_are_no_missing_traces(finished, changed):
    """What a hit leaves: a beginning of a prompt without a record."""
    changed(lambda arrays: erase(arrays, slice(0, 5)))
    result = audit_run(finished.folder.path, [2])
    assert result.exact and result.steps[0].experts == 0


@pytest.mark.parametrize("axis", [1, 2])
def test_a_trace_of_other_sizes_is_red_in_the_audit(finished, changed, axis):
    def widen(arrays):
        cut(arrays, "routing_experts", lambda a: np.concatenate([a, a], axis))
        if axis == 1:
            cut(arrays, "routing_margins", lambda a: np.concatenate([a, a], axis))

    changed(widen)
    (step,) = audit_run(finished.folder.path, [2]).steps
    assert step.experts == 2 * step.routed > 0


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("routing_margins", lambda a: a.astype(np.float64)),
        ("routing_margins", lambda a: a[:, :1]),
        ("routing_experts", lambda a: a.astype(np.float32)),
        ("routing_experts", lambda a: a[:, 0, 0]),
        ("routing_experts", lambda a: a[:, :, :0]),
    ],
)
def test_arrays_that_are_no_trace_are_refused(finished, changed, name, change):
    changed(lambda arrays: cut(arrays, name, change))
    with pytest.raises(CheckpointError, match=r"step-2\.json: not a whole rollout .* are no record of routing"):
        read_rollout(finished.folder.rollouts, 2)


def test_recording_changes_no_bit(base, finished):
    """The same run without a record; only its names are missing."""
    plain = train(recipe(base, ON[1], name="plain"))
    ours, theirs = (without_times(lines(run, "metrics")) for run in (plain, finished))
    for record in theirs:
        del record["moe/different_experts"]
    assert ours == theirs
    assert all(s.routing is None for s in read_rollout(plain.folder.rollouts, 1).samples)
    assert plain.decoder.digests() == finished.decoder.digests()


def test_the_balance_loss_is_part_of_the_course(base, finished):
    """The control of the test above, and a checkpoint of another coefficient is refused."""
    without = train(recipe(base, ON[0], name="without"))
    assert without.decoder.digests() != finished.decoder.digests()
    newest = str(list_checkpoints(finished.folder.checkpoints)[-2])
    with pytest.raises(ConfigError, match=r"moe\.balance_loss = 0\.02"):
        Run(recipe(base, ON[0], "moe.balance_loss=0.02", name="other"), newest)
    resumed = Run(recipe(base, ON[1], name="resumed"), newest)
    assert resumed.train() and resumed.decoder.digests() == finished.decoder.digests()


def test_one_sided_runs_log_a_share_of_other_experts(base):
    run = train(recipe(base, ON[0], "rollout.numerics=fp8-kv", "optimizer.max_steps=2", name="one-sided"))
    shares = [record["moe/different_experts"] for record in lines(run, "metrics")]
    assert len(shares) == 2 and all(0 < share < 1 for share in shares)


# ---- correction biases


def write_biased(folder):
    rule = Routing(6, 2, "sigmoid", normalise=True, scaling=2.0)
    moe = MoESpec(rule, expert_size=48, shared_size=48, dense_layers=(0,), has_bias=True)
    spec = tiny_spec("deepseek_v3", vocab_size=VOCAB, eos_token_ids=(END,), bos_token_id=None, moe=moe)
    write_random_model(folder, spec, seed=1, peak=2.0)
    write_byte_tokenizer(folder)


def test_a_killed_run_with_moving_biases_resumes_to_equal_bits(tmp_path):
    recipe(tmp_path, family="deepseek_v3")
    for path in (tmp_path / "model").iterdir():
        path.unlink()
    write_biased(tmp_path / "model")
    settings = (ON[0], "moe.router_bias_rate=0.01", "checkpoint.every=1", "checkpoint.keep=5")
    whole = train(recipe(tmp_path, *settings, name="whole"))
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    moved = whole.decoder.weights[name].value()
    source = dict(whole.files.tensors())[name]
    steps = (moved - source).abs() / 0.01
    assert steps.max() > 0.9 and ((steps - steps.round()).abs() < 1e-3).all()
    assert all(record["moe/different_experts"] == 0 for record in lines(whole, "metrics"))
    resumed = Run(recipe(tmp_path, *settings, name="resumed"), str(list_checkpoints(whole.folder.checkpoints)[0]))
    assert resumed.step == 1 and resumed.train()
    assert resumed.decoder.digests() == whole.decoder.digests()
    assert audit_run(whole.folder.path).exact


# ---- refusals


@pytest.mark.parametrize("setting", ["moe.record_routing=true", "moe.balance_loss=0.1", "moe.router_bias_rate=0.1"])
def test_dense_models_are_refused(tmp_path, setting):
    key = setting.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"{key} = .*: this llama model has no routed experts"):
        Run(recipe(tmp_path, setting), "never")


def test_routers_without_a_bias_are_refused(base, finished):
    with pytest.raises(ConfigError, match=r"bias_rate = 0\.1: routers of qwen3_moe have no correction bias"):
        Run(recipe(base, "moe.router_bias_rate=0.1", name="refused"), "never")
