"""Smoke runs: any recipe shrinks to something that runs, what gives way is said, and a difference is not missed."""

import dataclasses
import math
import re

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.tiny import tiny_spec
from zerogap.cli import app
from zerogap.config import load_config
from zerogap.errors import ConfigError
from zerogap.models.published import PUBLISHED
from zerogap.models.spec import ModelSpec
from zerogap.numerics import PRESETS
from zerogap.rl.loop import Run
from zerogap.rl.smoke import run_smoke, small_moe, small_numerics, small_recipe, small_spec, small_trainable
from zerogap.weights.random_model import write_random_model

NAMES = [f"model.layers.{i}.{role}.weight" for i in range(2) for role in ("mlp.down_proj", "self_attn.q_proj")]
FAR = {
    "model": "somewhere/not-here",
    "data": {"train": "not/here.jsonl", "system": "A long system message. " * 20, "max_prompt_length": 4},
    "reward": {"functions": ["not/here.py:reward", "number_match"], "weights": [1.0, 2.0]},
    "optimizer": {"max_steps": 1000, "warmup_steps": 100, "weight_decay": 0.1},
}


def test_a_recipe_whose_parts_are_all_missing_runs():
    """Model, data and reward are on another machine."""
    overrides = [
        "algorithm.num_iterations=2",
        "algorithm.loss_type=dr_grpo",
        "checkpoint.every=50",
        "eval.num_samples=8",
    ]
    overrides += ["eval.temperature=1.0", "eval.pass_k=[1,4,8]", "rollout.top_k=20", "algorithm.scale_rewards=batch"]
    result = run_smoke(load_config(FAR, overrides))
    assert result.exact and result.family == "llama"
    assert result.compared == 16 * 8 * 2
    small = result.config
    assert (small.algorithm.num_iterations, small.rollout.top_k, small.optimizer.weight_decay) == (2, 20, 0.1)
    assert (small.eval.num_samples, small.eval.pass_k, small.checkpoint.every) == (2, (1,), 1)
    assert any("not/here.jsonl" in note for note in result.notes)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_the_model_is_of_the_recipe_s_own_family_where_that_is_known(tmp_path, family):
    write_random_model(tmp_path / "model", tiny_spec(family, head_dim=80, num_layers=5))
    config = load_config(FAR | {"model": str(tmp_path / "model"), "numerics": "fp8-kv"})
    _, spec, notes = small_recipe(config, tmp_path / "smoke")
    assert (spec.family, spec.head_dim, spec.num_layers) == (family, 80, 2)
    assert (spec.qk_norm, spec.qkv_bias, spec.tied) == (family == "qwen3", family == "qwen2", family == "qwen2")
    assert not any("unknown" in note for note in notes)
    result = run_smoke(config)
    assert result.exact and result.family == family


def test_layers_that_stay_bf16_never_take_all_there_are():
    assert small_numerics("fp8", NAMES) == ("fp8", [])
    asked = {"preset": "fp8-kv", "kv_scale": "calibrated", "bf16_layers": {"first": 1, "tensors": ["mlp.down_proj"]}}
    assert small_numerics(asked, NAMES) == (asked, [])
    asked["bf16_layers"] = {"first": 2, "last": 3, "tensors": ["layers.30.mlp", "q_proj"]}
    small, notes = small_numerics(asked, NAMES)
    assert small == {
        "preset": "fp8-kv",
        "kv_scale": "calibrated",
        "bf16_layers": {"first": 1, "last": 0, "tensors": ["q_proj"]},
    }
    assert "first 2 and last 3" in notes[0] and "layers.30.mlp" in notes[1] and len(notes) == 2
    small, _ = small_numerics({"preset": "fp8", "bf16_last": 4}, NAMES)
    assert small == {"preset": "fp8", "bf16_layers": {"first": 0, "last": 1, "tensors": []}}


def test_sides_that_differ_in_their_bf16_layers_alone_still_differ(tmp_path):
    def keeping(first):
        return {"preset": "fp8", "bf16_layers": {"first": first}}

    tree = FAR | {"numerics": keeping(2), "rollout": {"numerics": keeping(4)}}
    small, _, notes = small_recipe(load_config(tree), tmp_path)
    assert small.one_sided
    assert any("differ in their BF16 layers only" in note for note in notes)


def test_what_is_trained_of_two_layers():
    assert small_trainable(["all"], NAMES) == (["all"], [])
    chosen, notes = small_trainable(["last:2", "last:8", "model.layers.29.*", "*.q_proj.weight"], NAMES)
    assert chosen == ["last:2", "last:1", "*.q_proj.weight"]
    assert notes == ["last:8 is last:1 here", "model.layers.29.* is last:1 here"]


def test_an_unknown_family_is_a_llama_or_has_experts_where_the_recipe_speaks_of_them():
    assert (small_spec(None).family, small_spec(None).num_layers) == ("llama", 2)
    assert small_spec(None, routed=True).moe.top_k < small_spec(None, routed=True).moe.num_experts


@pytest.mark.parametrize("name", ["Qwen/Qwen3-30B-A3B", "moonshotai/Moonlight-16B-A3B-Instruct"])
def test_experts_and_latents_shrink_by_the_models_own_rules(name):
    own = ModelSpec.from_hf(PUBLISHED[name])
    small = small_spec(own)
    assert ModelSpec.from_hf(small.to_hf()) == small
    for key in ("scoring", "normalise", "scaling"):
        assert getattr(small.moe.routing, key) == getattr(own.moe.routing, key)
    assert small.moe.num_experts > small.moe.top_k >= 2 and small.moe.routed_layers(small.num_layers)
    assert bool(small.moe.shared_size) == bool(own.moe.shared_size) and small.moe.has_bias == own.moe.has_bias
    assert bool(small.moe.dense_layers) == bool(own.moe.dense_layers)
    assert (small.mla is None) == (own.mla is None)
    if own.mla is not None:
        assert (small.mla.sizes.nope, small.mla.sizes.rope) == (own.mla.sizes.nope, own.mla.sizes.rope)
    count = sum(math.prod(weight.shape) for weight in small.weight_specs(PRESETS["bf16"]).values())
    assert count < 4e6


def test_groups_of_experts_stay_groups():
    moe = ModelSpec.from_hf(PUBLISHED["moonshotai/Moonlight-16B-A3B-Instruct"]).moe
    grouped = dataclasses.replace(moe, routing=dataclasses.replace(moe.routing, groups=8, top_groups=4))
    assert small_moe(grouped).routing.groups == 4 and small_moe(grouped).routing.top_groups == 2


RECIPE = "recipes/smollm2-largest-of-three.yaml"


@pytest.fixture
def no_model_here(monkeypatch):
    monkeypatch.setattr("zerogap.rl.smoke.spec_at_hand", lambda _source: None)


def test_the_command_says_what_was_run_and_that_it_is_exact(no_model_here):
    done = CliRunner().invoke(app, ["train", RECIPE, "--smoke", "numerics=fp8"])
    assert done.exit_code == 0, done.output
    assert re.search(r"^exact: 0 of 2\d\d log-probs differ", done.output, re.MULTILINE)
    for part in ("2 steps of AdamW, 16 completions; numerics fp8; loss dapo", "largest_of_three", "smollm2"):
        assert part in done.output


def test_one_sided_is_never_called_exact(no_model_here):
    done = CliRunner().invoke(app, ["train", RECIPE, "--smoke", "rollout.numerics=fp8-kv"])
    assert done.exit_code == 0, done.output
    assert "one-sided, not exact, as the recipe asks: " in done.output
    assert "numerics bf16, rollout fp8-kv; loss dapo; correction none" in done.output
    assert "\nexact" not in done.output


def test_a_difference_ends_with_exit_code_1(no_model_here, monkeypatch):
    roll_out = Run._roll_out

    def shifted(self, *args):
        first, *others = roll_out(self, *args)
        return [dataclasses.replace(first, logprobs=np.nextafter(first.logprobs, np.float32(0))), *others]

    monkeypatch.setattr(Run, "_roll_out", shifted)
    done = CliRunner().invoke(app, ["train", RECIPE, "--smoke"])
    assert done.exit_code == 1
    assert re.search(r"^not exact: [1-9]\d* of 2\d\d log-probs differ", done.output, re.MULTILINE)


def test_a_smoke_run_resumes_nothing():
    done = CliRunner().invoke(app, ["train", RECIPE, "--smoke", "--resume", "never"])
    assert isinstance(done.exception, ConfigError) and "--resume" in str(done.exception)
