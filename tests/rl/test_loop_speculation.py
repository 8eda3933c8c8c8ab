"""Speculation in a run: every bit as without, figures that are logged, earlier completions back after a resume."""

import pytest

from tests.rl.test_loop import StopAt
from tests.tiny_runs import lines, recipe, train, without_times
from zerogap.rl.dictionary import find
from zerogap.rl.loop import Run
from zerogap.rl.metrics import speculation_metrics
from zerogap.rollout.progress import Statistics

COMMON = (
    *("optimizer.max_steps=6", "rollout.prompts_per_step=5", "rollout.max_completion_length=16"),
    *("rollout.temperature=0.5", "eval.every=2"),
)
GUESSING = (*COMMON, "rollout.speculation.draft_tokens=8", "rollout.speculation.min_match=1")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tmp_path_factory.mktemp("speculation")


@pytest.fixture(scope="module")
def guessing(base):
    return train(recipe(base, *GUESSING, name="guessing"))


def without_speculation(records):
    return [{k: v for k, v in r.items() if not k.startswith("speculation/")} for r in without_times(records)]


def test_a_run_that_speculates_has_the_bits_of_one_that_does_not(base, guessing):
    plain = train(recipe(base, *COMMON, name="plain"))
    assert guessing.decoder.digests() == plain.decoder.digests()
    ours, theirs = lines(guessing, "metrics"), lines(plain, "metrics")
    assert without_speculation(ours) == without_times(theirs)
    assert without_times(lines(guessing, "eval")) == without_times(lines(plain, "eval"))
    assert lines(guessing, "completions") == lines(plain, "completions")
    assert guessing.engine.statistics.steps < plain.engine.statistics.steps
    assert not any(name.startswith("speculation/") for record in theirs for name in record)


def test_what_guessing_did_is_logged(guessing):
    records = lines(guessing, "metrics")
    assert all(0.0 <= r["speculation/acceptance_rate"] <= 1.0 for r in records)
    assert max(r["speculation/tokens_per_pass"] for r in records) > 1.0
    assert max(r["speculation/speed_up"] for r in records) > 1.0
    names = {name for name in records[0] if name.startswith("speculation/")}
    assert len(names) == 3 and all(find(name) for name in names)


def test_figures_are_of_one_rollout():
    before = Statistics(decode_tokens=10, draft_tokens=5, accepted_tokens=1, decode_cost=100.0, plain_cost=90.0)
    after = Statistics(decode_tokens=30, draft_tokens=15, accepted_tokens=9, decode_cost=150.0, plain_cost=190.0)
    assert speculation_metrics(before, after) == {
        "speculation/acceptance_rate": 0.8,
        "speculation/tokens_per_pass": 1.4,
        "speculation/speed_up": 2.0,
    }
    assert speculation_metrics(before, before) == {}
    idle = Statistics(decode_tokens=11, draft_tokens=5, accepted_tokens=1, decode_cost=113.0, plain_cost=103.0)
    assert speculation_metrics(before, idle)["speculation/acceptance_rate"] == 0.0


def test_a_resumed_run_copies_from_the_last_two_passes_over_the_prompts(base, guessing):
    watch = StopAt(5, "rollout")
    config = recipe(base, *GUESSING, name="stopped")
    watch.run = Run(config, "never", watch)
    assert not watch.run.train()
    resumed = Run(config, "auto")
    store = resumed.engine._speculator._store
    assert resumed.step == 4 and len(store._stored) == 5
    assert [len(texts) for texts in store._stored.values()] == [2 * 4] * 5, "of steps 3 and 4, not of those before"
    assert resumed.train()
    assert resumed.decoder.digests() == guessing.decoder.digests()
    assert without_speculation(lines(resumed, "metrics")) == without_speculation(lines(guessing, "metrics"))


def test_another_run_does_not_begin_with_a_foreign_runs_completions(base, guessing):
    fresh = Run(recipe(base, *GUESSING, name="fresh"), "never")
    assert not fresh.engine._speculator._store._stored
