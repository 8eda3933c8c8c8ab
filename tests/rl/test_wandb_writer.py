"""What goes to Weights & Biases is what metrics.jsonl and eval.jsonl hold; without the package a recipe is refused."""

import importlib.util
import math
import sys
import types

import pytest

from tests.tiny_runs import lines, recipe, train
from zerogap.errors import ConfigError
from zerogap.rl.loop import Run
from zerogap.rl.wandb_writer import WandbWriter


class Recorded:
    """Stands in for the package: keeps what it is told."""

    def __init__(self):
        self.begun, self.defined, self.logged, self.ended = None, [], [], 0

    def init(self, **words):
        self.begun = words
        return self

    def define_metric(self, name, step_metric):
        self.defined.append((name, step_metric))

    def log(self, numbers):
        self.logged.append(numbers)

    def finish(self):
        self.ended += 1


@pytest.fixture
def package(monkeypatch):
    recorded = Recorded()
    module = types.ModuleType("wandb")
    module.init = recorded.init
    module.__spec__ = importlib.util.spec_from_loader("wandb", None)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return recorded


def test_every_number_of_a_run_goes_there(tmp_path, package):
    run = train(recipe(tmp_path, "logging.wandb=mine"))
    assert (package.begun["project"], package.begun["name"]) == ("mine", "run")
    assert package.begun["config"]["optimizer"]["max_steps"] == 3
    assert package.defined == [("*", "step")] and package.ended == 1
    first, last = lines(run, "eval")
    assert package.logged == [first, *lines(run, "metrics"), last]


def test_what_is_no_finite_number_stays_out(tmp_path, package):
    writer = WandbWriter(tmp_path / "run", True, {})
    writer.add(4, {"step": 4, "a": 1, "b": math.nan, "c": "text", "d": True, "e": math.inf})
    assert package.logged == [{"step": 4, "a": 1}]
    assert package.begun["project"] == "zerogap"


def test_a_missing_package_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    config = recipe(tmp_path, "logging.wandb=true", "model=nowhere")
    with pytest.raises(ConfigError, match=r"logging\.wandb = True: install the extra: pip install 'zerogap\[wandb\]'"):
        Run(config)
