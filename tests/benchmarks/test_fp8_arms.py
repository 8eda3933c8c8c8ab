"""Arms, held-out prompts and the clock of the accuracy benchmark."""

import re
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.fp8_accuracy.arms import ARMS, DEFAULT_ARMS, Experiment, merged, what_decides
from benchmarks.fp8_accuracy.clock import Clock
from benchmarks.fp8_accuracy.held_out import PARTS, TEMPLATES, TEXT, digest, held_out_prompts
from zerogap.rl import tasks

EXPERIMENT = Experiment(12, 5e-5, "linear")


def leaves(tree, prefix=""):
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


@pytest.mark.parametrize("name", [name for name in ARMS if name != "bf16"])
def test_runs_of_one_seed_differ_in_their_numerics_and_correction_alone(name):
    baseline, ours = (
        dict(leaves(EXPERIMENT.recipe(ARMS[arm], 3, Path("x")).model_dump(mode="json"))) for arm in ("bf16", name)
    )
    changed = {key for key in {*baseline, *ours} if baseline.get(key, None) != ours.get(key, None)}
    assert changed
    assert all(key.startswith(("numerics", "rollout.numerics", "algorithm.correction.")) for key in changed), changed


def test_the_contracts_of_the_arms():
    sides = {}
    for name, arm in ARMS.items():
        config = EXPERIMENT.recipe(arm, 0, Path("x"))
        sides[name] = (config.contract().name, config.rollout_contract().name, config.one_sided)
        assert arm.rollout.startswith(config.rollout_contract().name)
    assert sides == {
        "bf16": ("bf16", "bf16", False),
        "fp8-rollout": ("bf16", "fp8-kv", True),
        "fp8-rollout-tis": ("bf16", "fp8-kv", True),
        "fp8": ("fp8", "fp8", False),
        "fp8-kv": ("fp8-kv", "fp8-kv", False),
        "fp8-kv-calibrated": ("fp8-kv", "fp8-kv", False),
    }
    kinds = {name: EXPERIMENT.recipe(arm, 0, Path("x")).algorithm.correction for name, arm in ARMS.items()}
    assert {name for name, correction in kinds.items() if correction.active} == {"fp8-rollout-tis"}
    assert kinds["fp8-rollout-tis"].bounds == (None, 2.0)
    assert EXPERIMENT.recipe(ARMS["fp8-kv-calibrated"], 0, Path("x")).contract().kv_scale == "calibrated"
    assert "fp8-kv-calibrated" not in DEFAULT_ARMS


def test_experiment_and_seed_reach_the_recipe():
    config = Experiment(60, 2e-4, "constant", 10).recipe(ARMS["fp8"], 7, Path("there"))
    assert (config.optimizer.max_steps, config.optimizer.learning_rate, config.seed) == (60, 2e-4, 7)
    assert (config.optimizer.lr_scheduler_type, config.checkpoint.every, config.output_dir) == ("constant", 10, "there")
    assert config.eval.num_prompts == 0
    assert Experiment(60, 2e-4, "constant").name == "steps60-lr0.0002-constant"


def test_what_decides_leaves_out_where_a_run_lies_and_nothing_else():
    one, other = (Experiment(12, 5e-5, "linear", every).recipe(ARMS["fp8"], 0, Path(f"p{every}")) for every in (0, 5))
    assert what_decides(one) == what_decides(other)
    assert what_decides(one) != what_decides(EXPERIMENT.recipe(ARMS["fp8"], 1, Path("p0")))
    assert {"model", "numerics", "data", "rollout", "algorithm", "optimizer", "seed"} <= set(what_decides(one))


def test_merging_replaces_leaves_and_shares_nothing():
    tree, keys = {"a": {"b": 1, "c": [2]}, "d": "bf16"}, {"a": {"b": 3}, "d": {"preset": "fp8"}}
    result = merged(tree, keys)
    assert result == {"a": {"b": 3, "c": [2]}, "d": {"preset": "fp8"}}
    result["a"]["c"].append(9)
    result["d"]["x"] = 1
    assert tree == {"a": {"b": 1, "c": [2]}, "d": "bf16"}
    assert keys == {"a": {"b": 3}, "d": {"preset": "fp8"}}


# ---------------------------------------------------------------------------------------------------- held-out prompts


def test_a_thousand_distinct_held_out_prompts_and_none_is_trained_on():
    prompts = held_out_prompts()
    assert len(prompts) >= 1000
    assert len({p.prompt for p in prompts}) == len(prompts)
    assert Counter(p.part for p in prompts) == {"products": 504, "two-digit": 504}
    assert f"{len(prompts):,} prompts" in TEXT
    trained = {item["prompt"] for item in tasks.multiplication()[0]}
    assert not trained & {p.prompt for p in prompts}


def test_no_product_is_trained_on_in_any_order_or_wording():
    def pair(text):
        return frozenset(Counter(re.findall(r"\d+", text)).items())

    trained = {pair(item["prompt"]) for item in tasks.multiplication()[0]}
    assert len(trained) == 42  # 76 ordered pairs: 8 squares, 34 pairs in both orders
    assert not trained & {pair(p.prompt) for p in held_out_prompts()}


def test_answers_are_the_products():
    for prompt in held_out_prompts():
        a, b = map(int, re.findall(r"\d+", prompt.prompt))
        assert int(prompt.answer) == a * b
        assert (a < 10) == (prompt.part == PARTS[0])
        assert b < 10


def test_templates_use_each_factor_once_and_no_other_digit():
    assert len(set(TEMPLATES)) == len(TEMPLATES) == 21
    for template in TEMPLATES:
        assert template.count("{a}") == template.count("{b}") == 1
        assert not re.search(r"\d", template)


def test_the_digest_is_of_prompts_and_answers():
    prompts = held_out_prompts()
    assert digest(prompts) == digest(held_out_prompts())
    assert digest(prompts) != digest(prompts[:-1])


# ---------------------------------------------------------------------------------------------------- clock


def test_time_left_is_what_an_arm_took_and_the_mean_of_others_for_a_new_one():
    clock = Clock()
    clock.plan("step", "a", 3)
    clock.plan("step", "b", 2)
    assert clock.left() is None
    assert str(clock) == "?"
    clock.done("step", "a", 10.0)
    assert clock.left() == 2 * 10.0 + 2 * 10.0
    clock.done("step", "b", 30.0)
    assert clock.left() == 2 * 10.0 + 1 * 30.0
    clock.plan("evaluation", "a", 1)
    assert clock.left() is None  # steps say nothing about evaluations
    clock.done("evaluation", "a", 5.0)
    clock.skip("step", "a", 2)
    assert clock.left() == 30.0
    assert str(clock) == "30 s"
    clock.done("step", "b", 30.0)
    assert clock.left() == 0.0
    clock.seen("step", "c", 2.0)
    clock.plan("step", "c", 4)
    assert clock.left() == 8.0
