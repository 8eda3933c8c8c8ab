"""The audit is green on an honest run, and red after one changed weight or one flipped bit of a log-prob."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_tensors
from safetensors.torch import save_file as save_tensors
from typer.testing import CliRunner

from tests.tiny_runs import recipe, train
from zerogap.cli import app
from zerogap.errors import CheckpointError, ConfigError, ContractError
from zerogap.verify.audit import AuditSettings, audit_run

SETTINGS = ("logging.audit_every=2", "optimizer.max_steps=4", "rollout.top_k=30", "rollout.stop=[zz]")


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    """A run of four steps, of which steps 1, 2 and 4 have their weights saved."""
    return train(recipe(tmp_path_factory.mktemp("audit"), *SETTINGS)).folder.path


@pytest.fixture
def copy(honest, tmp_path):
    """A copy that a test may damage."""
    shutil.copytree(honest, tmp_path / "copy")
    return tmp_path / "copy"


def flip_logprob(run, step, token=3):
    path = run / "rollouts" / f"step-{step}.safetensors"
    arrays = load_file(path)
    arrays["logprobs"].view(np.int32)[token] ^= 1
    save_file(arrays, path)


def change_weight(run, version, name="model.layers.1.mlp.down_proj.weight"):
    """Negate the largest element of one tensor; everything else stays."""
    path = run / "weights" / f"version-{version}" / "model.safetensors"
    tensors = load_tensors(path)
    flat = tensors[name].reshape(-1)
    flat[flat.abs().argmax()] *= -1
    save_tensors(tensors, path, metadata={"format": "pt"})
    return name


def test_an_honest_run_is_exact_under_other_conditions(honest):
    result = audit_run(honest)
    assert result.exact
    assert [(s.step, s.version, s.differences) for s in result.steps] == [(1, 0, 0), (2, 1, 0), (4, 3, 0)]
    assert result.not_covered == [(3, "the weights of version 2 were not saved")]
    assert [(w.version, w.changed, w.damaged) for w in result.weights] == [(0, (), ""), (1, (), ""), (3, (), "")]
    assert all(w.tensors == 21 for w in result.weights)  # 20 weights and the RoPE table
    assert result.tokens > 150


@pytest.mark.parametrize(("page_size", "threads"), [(16, 2), (128, 3)])
def test_conditions_can_be_chosen(honest, page_size, threads):
    result = audit_run(honest, [2], AuditSettings(page_size, threads))
    assert result.exact
    assert [s.step for s in result.steps] == [2]
    assert f"page size {page_size} (run: 16), {threads} threads" in result.notes[0]


def test_one_flipped_bit_of_a_logged_logprob_is_red_on_every_path(copy):
    flip_logprob(copy, 2)
    result = audit_run(copy)
    assert not result.exact
    by_step = {s.step: s for s in result.steps}
    assert (by_step[2].trainer, by_step[2].engine, by_step[2].redrawn) == (1, 1, 1)
    assert "trainer: sample 0, completion token 3" in by_step[2].first
    assert by_step[1].differences == by_step[4].differences == 0
    assert not any(w.changed for w in result.weights)


def test_one_changed_weight_is_red_in_digests_and_logprobs(copy):
    name = change_weight(copy, 1)
    result = audit_run(copy)
    assert not result.exact
    assert {w.version: w.changed for w in result.weights} == {0: (), 1: (name,), 3: ()}
    by_step = {s.step: s for s in result.steps}
    assert min(by_step[2].trainer, by_step[2].engine, by_step[2].redrawn) > 0
    assert by_step[1].differences == by_step[4].differences == 0


def test_one_changed_token_is_red(copy):
    path = copy / "rollouts" / "step-1.safetensors"
    arrays = load_file(path)
    arrays["completion_ids"][0] ^= 1
    save_file(arrays, path)
    (step,) = audit_run(copy, [1]).steps
    assert min(step.trainer, step.engine, step.redrawn) > 0


def test_a_changed_kept_set_is_red_on_the_redrawn_path(copy):
    path = copy / "rollouts" / "step-1.safetensors"
    arrays = load_file(path)
    arrays["kept_digests"][4] ^= 1
    save_file(arrays, path)
    (step,) = audit_run(copy, [1]).steps
    assert (step.trainer, step.engine, step.redrawn) == (0, 0, 1)


@pytest.mark.parametrize("more", [1, -1])
def test_a_longer_or_shorter_completion_is_red_on_the_redrawn_path(copy, more):
    path = copy / "rollouts" / "step-1.json"
    content = json.loads(path.read_text())
    record = next(r for r in content["samples"] if r["finish_reason"] == "length")
    record["params"]["max_tokens"] += more
    path.write_text(json.dumps(content))
    (step,) = audit_run(copy, [1]).steps
    assert (step.trainer, step.engine, step.redrawn) == (0, 0, 1)


def test_another_key_is_red_on_the_redrawn_path(copy):
    path = copy / "rollouts" / "step-1.json"
    content = json.loads(path.read_text())
    content["samples"][0]["key"]["sample"] += 100
    path.write_text(json.dumps(content))
    (step,) = audit_run(copy, [1]).steps
    assert (step.trainer, step.engine) == (0, 0)
    assert step.redrawn > 0


def test_damaged_weights_are_red_and_named(copy):
    path = copy / "weights" / "version-3" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    result = audit_run(copy)
    assert not result.exact
    assert "model.safetensors" in result.weights[-1].damaged
    assert (4, "the weights of version 3 are damaged") in result.not_covered
    assert [s.step for s in result.steps] == [1, 2]


def test_nothing_compared_is_not_exact(copy):
    shutil.rmtree(copy / "weights")
    result = audit_run(copy)
    assert not result.exact
    assert [step for step, _ in result.not_covered] == [1, 2, 3, 4]


def test_another_list_of_quantised_tensors_is_refused(copy):
    """A rule that picks tensors by name picked others when the weights were saved."""
    path = copy / "weights" / "version-1" / "zerogap.json"
    facts = json.loads(path.read_text())
    assert facts["quantised"] == []
    path.write_text(json.dumps(facts | {"quantised": ["model.layers.1.mlp.up_proj.weight"]}))
    with pytest.raises(ContractError, match=r"version-1.*model\.layers\.1\.mlp\.up_proj\.weight is quantised there"):
        audit_run(copy)


def test_a_source_that_is_gone_is_said(copy):
    facts = copy / "weights" / "version-0" / "zerogap.json"
    facts.write_text(json.dumps(json.loads(facts.read_text()) | {"source": str(copy / "gone")}))
    result = audit_run(copy, [1, 2])
    assert "cannot be opened" in dict(result.not_covered)[1]
    assert [s.step for s in result.steps] == [2]


def test_other_backends_are_refused_and_other_builds_are_said(copy):
    path = copy / "rollouts" / "step-2.json"
    text = path.read_text()
    build = json.loads(text)["samples"][0]["identity"]["build"]
    path.write_text(text.replace(build, "0123456789ab"))
    result = audit_run(copy, [2])
    assert result.exact
    assert any("build 0123456789ab" in note for note in result.notes)
    backend = json.loads(text)["samples"][0]["identity"]["backend"]
    path.write_text(text.replace(backend, "cpu/abacus"))
    with pytest.raises(ContractError, match="cpu/abacus"):
        audit_run(copy, [2])


def test_what_is_no_run_and_what_was_not_logged_is_refused(honest, tmp_path):
    with pytest.raises(CheckpointError, match="not the folder of a run"):
        audit_run(tmp_path)
    with pytest.raises(ConfigError, match="4 steps from 1 to 4"):
        audit_run(honest, [5])


# ---- the command


def test_the_command_prints_a_table_and_exits_0(honest, tmp_path):
    done = CliRunner().invoke(app, ["audit", str(honest), "--json", str(tmp_path / "audit.json")])
    assert done.exit_code == 0, done.output
    assert "0 differences" in done.output
    assert "step 3 is not covered: the weights of version 2 were not saved" in done.output
    facts = json.loads((tmp_path / "audit.json").read_text())
    assert facts["exact"]
    assert [s["step"] for s in facts["steps"]] == [1, 2, 4]


def test_the_command_exits_1_when_red(copy):
    flip_logprob(copy, 2)
    name = change_weight(copy, 3)
    done = CliRunner().invoke(app, ["audit", str(copy), "--steps", "1-2,4"])
    assert done.exit_code == 1
    assert "not exact" in done.output
    assert "DIFFERS" in done.output
    assert name in done.output.replace("\n", "")
    assert CliRunner().invoke(app, ["audit", str(copy), "--steps", "1"]).exit_code == 0
