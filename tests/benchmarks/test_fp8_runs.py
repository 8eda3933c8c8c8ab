"""Runs of the accuracy benchmark on a tiny model: stored whole, resumed where they were, and refused beside others."""

import json

import pytest
import yaml

from benchmarks.fp8_accuracy.arms import ARMS, Experiment, what_decides
from benchmarks.fp8_accuracy.evaluate import Evaluator, accuracies
from benchmarks.fp8_accuracy.held_out import held_out_prompts
from benchmarks.fp8_accuracy.runs import read_stored, remove_work, stored_path, train
from tests.tiny_runs import recipe
from zerogap.rl.observer import Observer
from zerogap.text import Tokenizer
from zerogap.weights import open_model

PROMPTS = held_out_prompts()[::84]


class Killed(Exception):
    pass


class KillAfter(Observer):
    """Ends the process's work, as far as a test can, when the step after `step` begins."""

    def __init__(self, step):
        self.step = step
        self.seen = []

    def phase(self, step, name):
        if step > self.step:
            raise Killed

    def step_done(self, record):
        self.seen.append(record["step"])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(experiment of 4 steps on a tiny model, evaluator)."""
    folder = tmp_path_factory.mktemp("tiny")
    config = recipe(folder, "optimizer.max_steps=4", "data.max_prompt_length=128")
    base = folder / "base.yaml"
    base.write_text(config.to_yaml())
    files = open_model(config.model)
    tokenizer = Tokenizer.from_files(files.tokenizer_files(), files.chat_template)
    return Experiment(4, 1e-3, "constant", 1, base), Evaluator(PROMPTS, tokenizer, 6)


def figures(path):
    """A stored result without what a clock decides."""
    stored = json.loads(path.read_text())
    for step in stored["steps"]:
        for name in ("seconds", "phases", "tokens", "tokens_per_second", "recalibration_seconds"):
            step.pop(name)
    for evaluation in stored["evaluations"].values():
        evaluation.pop("seconds")
    return {
        k: stored[k] for k in stored if k not in ("seconds", "seconds_per_step", "tokens_per_second", "digests")
    } | {
        "end": stored["digests"]["end"],
        "recalibration_share": None,
    }


@pytest.mark.parametrize("killed_after", [0, 2, 3])
def test_a_killed_run_goes_on_and_ends_with_the_same_figures(tiny, tmp_path, killed_after):
    experiment, evaluator = tiny
    arm, seconds = ARMS["bf16"], []
    train(experiment, arm, 1, tmp_path / "whole", evaluator, Observer(), seconds.append)
    assert len(seconds) == 1  # one contract, one evaluation
    with pytest.raises(Killed):
        train(experiment, arm, 1, tmp_path / "cut", evaluator, KillAfter(killed_after), seconds.append)
    assert not stored_path(tmp_path / "cut", arm, 1).exists()
    rest = KillAfter(99)
    train(experiment, arm, 1, tmp_path / "cut", evaluator, rest, seconds.append)
    assert rest.seen == list(range(killed_after + 1, 5))
    whole, cut = (figures(stored_path(tmp_path / name, arm, 1)) for name in ("whole", "cut"))
    assert whole == cut
    assert [step["step"] for step in whole["steps"]] == [1, 2, 3, 4]


def test_a_run_killed_before_its_evaluation_is_not_trained_again(tiny, tmp_path):
    experiment, evaluator = tiny
    arm = ARMS["fp8"]

    def kill(seconds):
        raise Killed

    with pytest.raises(Killed):
        train(experiment, arm, 0, tmp_path, evaluator, Observer(), kill)
    rest = KillAfter(99)
    result = train(experiment, arm, 0, tmp_path, evaluator, rest, lambda seconds: None)
    assert rest.seen == []
    assert len(result["steps"]) == 4
    remove_work(tmp_path, arm, 0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fp8-seed0.json"]


@pytest.mark.parametrize("name", ["fp8-rollout", "fp8-rollout-tis", "fp8", "fp8-kv", "fp8-kv-calibrated"])
def test_every_arm_trains_and_says_what_it_is(tiny, tmp_path, name):
    experiment, evaluator = tiny
    result = train(experiment, ARMS[name], 0, tmp_path, evaluator, Observer(), lambda seconds: None)
    one_sided = name.startswith("fp8-rollout")
    assert result["one_sided"] == one_sided
    assert bool(result["mismatched_tokens"]) == one_sided
    assert (result["k3_kl"] > 0.0) == one_sided
    assert result["compared_tokens"] > 0
    assert result["evaluations"]["own"]["contract"] == result["identities"]["rollout"]
    assert result["evaluations"]["own"]["contract"] != result["evaluations"]["bf16"]["contract"]
    assert ("weight_max" in result["steps"][0]) == (name == "fp8-rollout-tis")
    assert (result["recalibration_share"] > 0.0) == (name == "fp8-kv-calibrated")
    assert result["evaluations"]["own"]["num_prompts"] == len(PROMPTS) == len(result["evaluations"]["own"]["correct"])


def test_what_is_stored_is_taken_only_for_the_same_recipe_and_prompts(tiny, tmp_path):
    experiment, evaluator = tiny
    path = tmp_path / "run.json"
    wanted = what_decides(experiment.recipe(ARMS["bf16"], 0, tmp_path))
    assert read_stored(path, wanted, evaluator.digest) is None
    path.write_text(json.dumps({"format": 1, "recipe": wanted, "held_out": evaluator.digest}))
    assert read_stored(path, wanted, evaluator.digest)["recipe"] == wanted
    other = what_decides(experiment.recipe(ARMS["bf16"], 1, tmp_path))
    for asked, held_out, word in ((other, evaluator.digest, "recipe"), (wanted, "x", "held-out prompts")):
        with pytest.raises(SystemExit, match=word):
            read_stored(path, asked, held_out)


def test_accuracy_of_all_prompts_and_of_each_part():
    chosen = (*held_out_prompts()[:3], held_out_prompts()[-1])
    found = accuracies(chosen, [True, False, True, False])
    assert found == {"num_prompts": 4, "accuracy": 0.5, "parts": {"products": 2 / 3, "two-digit": 0.0}}


def test_the_tiny_recipe_is_the_one_that_is_changed(tiny):
    experiment, _ = tiny
    config = experiment.recipe(ARMS["fp8-rollout-tis"], 2, experiment.base.parent / "there")
    assert config.model == yaml.safe_load(experiment.base.read_text())["model"]
    assert config.one_sided
