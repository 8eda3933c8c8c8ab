"""`zerogap inspect RECIPE`: parameters, memory and fit of a run, without a weight, and without the model's files."""

import json
import re

import pytest
from typer.testing import CliRunner

from tests.models_on_disk import tiny_spec
from zerogap.cli import app
from zerogap.cli.inspect import as_bytes
from zerogap.config import load_config
from zerogap.errors import ConfigError
from zerogap.models.devices import DEVICES, machine_memory, parse_size
from zerogap.models.layout import Layout
from zerogap.models.memory import memory_plan
from zerogap.weights.random_model import write_random_model
from zerogap.weights.source import spec_at_hand

LARGE = "recipes/qwen3-30b-a3b-fp8-kv.yaml"


def inspected(*words):
    done = CliRunner().invoke(app, ["inspect", *map(str, words)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0
    return done.output


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """Of a model folder whose weights nobody may read."""
    write_random_model(tmp_path / "model", tiny_spec("qwen3_moe"))
    monkeypatch.setattr("zerogap.weights.folder.FolderFiles.tensors", lambda self: pytest.fail("weights are read"))
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"model: {tmp_path}/model\nnumerics: fp8-kv\ntrainable: last:1\ndata: {{train: multiplication}}\n"
        "optimizer: {max_steps: 1}\n"
    )
    return path


def test_what_is_printed_is_what_was_planned(recipe, tmp_path):
    out = inspected(
        recipe, "optimizer.activation_recompute=true", "--memory", "2GiB", "--json", tmp_path / "facts.json"
    )
    config = load_config(recipe, ["optimizer.activation_recompute=true"])
    plan = memory_plan(spec_at_hand(config.model), config)
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert {part["name"]: part["bytes"] for part in facts["memory"]} == {part.name: part.bytes for part in plan.parts}
    assert (facts["total_bytes"], facts["fits"], facts["changes"]) == (plan.total, True, [])
    assert facts["fingerprint"] == config.contract().fingerprint() and facts["quantised"]
    for part in plan.parts:
        assert re.search(rf"^{re.escape(part.name)} +{re.escape(as_bytes(part.bytes))} ", out, re.MULTILINE)
    assert f"{as_bytes(plan.other_activations)} without optimizer.activation_recompute" in out
    assert "fits: " in out and "one process" not in out


def test_parameters_by_part(recipe, tmp_path):
    inspected(recipe, "--json", tmp_path / "facts.json")
    parts = {c["part"]: c for c in json.loads((tmp_path / "facts.json").read_text())["parameters_by_part"]}
    experts = 2 * 6 * 3 * 48 * 96
    assert (parts["experts"]["total"], parts["experts"]["active"], parts["experts"]["trained"]) == (
        experts,
        experts * 2 // 6,
        experts // 2,
    )
    assert parts["router"]["total"] == parts["router"]["active"] == 2 * 6 * 96
    assert parts["head"]["total"] == 320 * 96 and parts["head"]["trained"] == 0
    assert set(parts) == {"embedding", "head", "attention", "experts", "router", "norms"}


def test_thousands_of_experts_are_a_few_lines(monkeypatch):
    """And the model's files are not here: what is packaged of it says enough."""
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)
    out = inspected(LARGE, "--device", "h200-141gb")
    assert "Quantised: 18,624 tensors" in out and len(out.splitlines()) < 90
    assert re.search(r"^mlp\.experts\.0-127\.down_proj, layers 0-47 +2048 x 768 ", out, re.MULTILINE)
    assert re.search(r"^mlp\.gate, layers 0-47 .*router", out, re.MULTILINE)
    assert "Parameters: 30.5B, 3.35B active per token, 2.49B trained (last:4)" in out
    assert "this version runs one process, on CPU" in out


def test_what_does_not_fit_says_what_would():
    out = inspected(LARGE, "trainable=all", "--device", "h100-80gb")
    assert "does not fit: " in out
    lines = [line for line in out.splitlines() if line.startswith("change")]
    assert any("trainable=last:1: " in line and "too much" in line for line in lines)
    (fitting,) = [line for line in lines if line.endswith(", fits")]
    layout = re.search(r"--devices (\d+) --layout (\S+): ", fitting)
    assert "fits: " in inspected(
        LARGE, "trainable=all", "--device", "h100-80gb", "--devices", layout[1], "--layout", layout[2]
    )


def test_layouts_say_that_they_are_arithmetic(recipe):
    out = inspected(recipe, "--devices", "2", "--layout", "ep=2", "--memory", "1GB")
    assert "on each of 2 devices (tp=1,ep=2,dp=2)" in out and "runs one process" in out
    assert "evenly loaded" in out and "dp=2 needs numerics.grad_bins=2" in out
    whole, split = (memory_plan(spec_at_hand(load_config(recipe).model), load_config(recipe), y).total for y in _two())
    assert as_bytes(split + 400 * 2**20) in out and split < whole


def _two():
    return Layout(), Layout(1, 2, 2)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--memory", "lots"], ["--memory", "24GB"]),
        (["--memory", "0GB"], ["--memory", "24GB"]),
        (["--memory", "9" * 400 + "GB"], ["--memory", "24GB"]),
        (["--layout", "tp=²"], ["--layout", "each a positive number"]),
        (["moe.router_bias_rate=0.1"], ["moe.router_bias_rate", "no correction bias"]),
        (["data.max_prompt_length=2000"], ["data.max_prompt_length", "1024 positions"]),
        (["--device", "abacus"], ["--device", "cpu", "h100-80gb"]),
        (["--layout", "ep=4,dp=4"], ["--layout", "6 experts"]),
        (["--numerics", "bf16"], ["--numerics", "numerics=..."]),
        (["trainable=last:9"], ["trainable", "last:1 to last:2"]),
        (["model=nobody/knows-it"], ["model", "config.json", "Qwen/Qwen3-30B-A3B"]),
    ],
)
def test_what_is_refused(recipe, words, parts):
    with pytest.raises(ConfigError) as caught:
        inspected(recipe, *words)
    assert all(part in str(caught.value) for part in parts)


def test_what_a_run_would_refuse_of_a_dense_model_is_refused(recipe):
    """As `zerogap train` does, before anybody rents a machine for it."""
    write_random_model(recipe.parent / "model", tiny_spec("llama"))
    for setting in ("moe.record_routing=true", "moe.balance_loss=0.1"):
        with pytest.raises(ConfigError, match=r"this llama model has no routed experts"):
            inspected(recipe, setting)


@pytest.mark.parametrize("words", [["--memory", "24GB"], ["--devices", "2"], ["--device", "h100-80gb"], ["a=1"]])
def test_a_model_has_no_run_to_plan(recipe, words):
    with pytest.raises(ConfigError, match=r"only a recipe"):
        inspected(recipe.parent / "model", *words)


def test_sizes_of_memory():
    assert parse_size("24GB") == 24 * 10**9 and parse_size("1.5 GiB") == 3 * 2**29 and parse_size("512b") == 512
    assert 2**28 < machine_memory() < 2**50
    assert DEVICES["h100-80gb"] < 80 * 2**30 < DEVICES["a100-80gb"] + 1
