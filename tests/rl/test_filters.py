"""Which groups stay, and dynamic sampling: what is drawn, in which order, and that a resumed run draws the same."""

import json

import numpy as np
import pytest

from tests.rl.rows import make_sample
from tests.tiny_runs import lines, recipe, train, without_times
from zerogap.config import ALGORITHMS
from zerogap.rl.dictionary import find
from zerogap.rl.filters import GroupFilter, Round, fill_slots
from zerogap.rl.loop import Run
from zerogap.rl.observer import Observer
from zerogap.rl.reward import RewardScores
from zerogap.rl.rollout_log import read_rollout


@pytest.mark.parametrize(
    ("drops_equal", "mean_range", "rewards", "kept"),
    [
        (False, None, [0.0, 0.0], True),
        (False, None, [None, None], True),
        (True, None, [0.1, 0.1, 0.1], False),
        (True, None, [0.1, 0.1, np.nextafter(0.1, 1)], True),
        (True, None, [1.0, None, 1.0], False),
        (True, None, [None, None], False),
        (True, None, [0.0, 1.0], True),
        (False, (0.25, 0.75), [0.0, 1.0], True),
        (False, (0.25, 0.75), [0.5, 0.5], True),
        (True, (0.25, 0.75), [0.5, 0.5], False),
        (False, (0.25, 0.75), [0.0, 0.0, 0.0, 1.0], True),
        (False, (0.25, 0.75), [0.0, 0.0, 0.0, 0.9], False),
        (False, (0.25, 0.75), [1.0, 1.0, None], False),
        (False, (0.25, 0.75), [None], False),
    ],
)
def test_which_groups_stay(drops_equal, mean_range, rewards, kept):
    assert GroupFilter(drops_equal, mean_range).keeps(rewards) is kept


class Draws:
    """Groups of two by a table of rewards per prompt; remembers what was asked for."""

    def __init__(self, rewards: list[tuple[float, float]]) -> None:
        self.rewards, self.asked = rewards, []

    def __call__(self, slots: list[int], attempt: int, position: int) -> Round:
        self.asked.append((list(slots), attempt, position))
        prompts = [p for p in range(position, position + len(slots)) for _ in range(2)]
        scores = [float(r) for p in range(position, position + len(slots)) for r in self.rewards[p]]
        extra = {"prompt": list(prompts)} | ({"odd": prompts[::-1]} if attempt % 2 else {})
        metrics = {"m": float(attempt)}
        samples = [make_sample(1 + p, seed=i) for i, p in enumerate(prompts)]
        return Round(prompts, samples, RewardScores(scores, [scores, [-s for s in scores]], extra, metrics, 1, 2))


MIXED, EQUAL = (0.0, 1.0), (1.0, 1.0)


def test_slots_are_filled_with_further_prompts_until_none_is_open():
    #              0      1      2      3 | for 1, 2: 4, 5 | for 2: 6
    draw = Draws([MIXED, EQUAL, EQUAL, MIXED, MIXED, EQUAL, MIXED, MIXED])
    groups = fill_slots(draw, GroupFilter(True), num_slots=4, max_rounds=9, position=0)
    assert draw.asked == [([0, 1, 2, 3], 0, 0), ([1, 2], 1, 4), ([2], 2, 6)]
    assert groups.chosen.prompts == [0, 0, 4, 4, 6, 6, 3, 3]
    assert (groups.position, groups.num_rounds, groups.num_prompts) == (7, 3, 7)
    assert groups.kept == (True,) * 8
    scores = groups.chosen.scores
    assert scores.totals == [0.0, 1.0] * 4
    assert scores.columns == [scores.totals, [-t for t in scores.totals]]
    assert scores.extra == {"prompt": groups.chosen.prompts, "odd": [None, None, 5, 5, None, None, None, None]}
    assert (scores.errors, scores.timeouts) == (3, 6), "of all rounds, as their completions were paid for"
    assert scores.metrics == {"m": (0 * 8 + 1 * 4 + 2 * 2) / 14}
    assert [len(s.completion_ids) for s in groups.chosen.samples] == [1 + p for p in groups.chosen.prompts]
    assert groups.drawn_tokens == sum(2 * (1 + p) for p in range(7))
    assert groups.all_tokens == groups.drawn_tokens + 3 * 14
    assert groups.metrics() == {
        "groups/kept_ratio": 1.0,
        "groups/rounds": 3,
        "groups/prompts": 7,
        "groups/position": 7,
    }


@pytest.mark.parametrize("max_rounds", [0, 1, 2])
def test_where_rounds_run_out_a_slot_keeps_its_last_group_out_of_the_loss(max_rounds):
    draw = Draws([EQUAL] * 10 + [MIXED, EQUAL, EQUAL, MIXED, EQUAL, EQUAL])
    groups = fill_slots(draw, GroupFilter(True), num_slots=3, max_rounds=max_rounds, position=10)
    if max_rounds < 2:
        assert (groups.chosen.prompts, groups.position) == ([10, 10, 11, 11, 12, 12], 13)
        assert groups.kept == (True, True, False, False, False, False)
    else:
        assert (groups.chosen.prompts, groups.position) == ([10, 10, 13, 13, 14, 14], 15)
        assert groups.kept == (True, True, True, True, False, False)
    assert groups.metrics()["groups/kept_ratio"] == (1 + (max_rounds == 2)) / 3


def test_without_a_filter_one_round_is_drawn_and_handed_on_as_it_is():
    draw = Draws([EQUAL] * 4)
    groups = fill_slots(draw, GroupFilter(), num_slots=4, max_rounds=0, position=0)
    assert draw.asked == [([0, 1, 2, 3], 0, 0)]
    assert groups.kept == (True,) * 8 and groups.metrics() == {}


# ---------------------------------------------------------------------------------------------------- whole runs


COARSE = """
def coarse(completion_ids, **columns):
    # many groups of equal rewards, which ones depends on what was drawn
    return [float(ids[0] % 4 == 0) for ids in completion_ids]
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("filters")
    (folder / "coarse.py").write_text(COARSE)
    return folder


def coarse(base, *overrides, name="run"):
    words = [f"reward.functions={base}/coarse.py:coarse", "optimizer.max_steps=4", "checkpoint.every=1"]
    return recipe(base, *words, *overrides, name=name)


@pytest.fixture(scope="module")
def dynamic(base):
    return train(coarse(base, "algorithm.dynamic_sampling.max_rounds=6", name="dynamic"))


def test_dynamic_sampling_replaces_groups_and_stays_exact(dynamic):
    records, position = lines(dynamic, "metrics"), 0
    assert sum(r["groups/rounds"] for r in records) > len(records), "some group was replaced"
    for record in records:
        assert record["bit_wise/mismatched_tokens"] == 0 < record["bit_wise/compared_tokens"]
        position += record["groups/prompts"]
        assert record["groups/position"] == position
        assert record["epoch"] == position / len(dynamic.prompts)
        assert [name for name in record if find(name) is None] == []
        logged = read_rollout(dynamic.folder.rollouts, record["step"])
        groups = [logged.rewards[i : i + 4] for i in range(0, 12, 4)]
        mixed = [min(g) < max(g) for g in groups]
        assert record["groups/kept_ratio"] == sum(mixed) / 3
        assert all(mixed) or record["groups/rounds"] == 6
        keys = [s.key for s in logged.samples]
        assert [(k.prompt, k.sample) for k in keys] == [(p, n) for p in range(3) for n in range(4)]
        assert max(k.attempt for k in keys) == record["groups/rounds"] - 1
    assert dynamic.position == position


def test_replacements_are_the_next_prompts_of_the_order(dynamic):
    """Walks the order along the logged attempts: round r of a step begins where round r - 1 ended."""
    position = 0
    for record in lines(dynamic, "metrics"):
        keys = [s.key.attempt for s in read_rollout(dynamic.folder.rollouts, record["step"]).samples[::4]]
        drawn = read_rollout(dynamic.folder.rollouts, record["step"]).samples[::4]
        open_slots = [0, 1, 2]
        for attempt in range(record["groups/rounds"]):
            rows = dynamic.order.take(position, len(open_slots))
            for slot, row in zip(open_slots, rows, strict=True):
                if keys[slot] == attempt:
                    assert drawn[slot].prompt_ids.tolist() == dynamic.prompts[row].ids.tolist()
            position += len(open_slots)
            open_slots = [slot for slot in open_slots if keys[slot] > attempt]
        assert position == record["groups/position"]


class StopAt(Observer):
    """Asks the run to stop in a phase of a step."""

    def __init__(self, step, phase):
        self.at, self.run = (step, phase), None

    def phase(self, step, name):
        if (step, name) == self.at:
            self.run.ask_to_stop()


@pytest.mark.parametrize("phase", ["rollout", "train"])
def test_a_resumed_run_draws_the_same(base, dynamic, phase):
    config = coarse(base, "algorithm.dynamic_sampling.max_rounds=6", name=f"stopped-{phase}")
    watch = StopAt(3, phase)
    watch.run = Run(config, "never", watch)
    assert not watch.run.train()
    resumed = Run(config, "auto")
    assert resumed.position == lines(dynamic, "metrics")[resumed.step - 1]["groups/position"]
    assert resumed.train()
    assert without_times(lines(resumed, "metrics")) == without_times(lines(dynamic, "metrics"))
    assert resumed.decoder.digests() == dynamic.decoder.digests()


def test_a_checkpoint_without_a_position_is_one_of_whole_steps(base):
    config = coarse(base, "optimizer.max_steps=2", name="older")
    train(config)
    state = base / "older" / "checkpoints" / "checkpoint-2" / "state.json"
    facts = json.loads(state.read_text())
    assert facts["extra"].pop("position") == 6
    state.write_text(json.dumps(facts))
    assert Run(coarse(base, "optimizer.max_steps=3", name="older"), "auto").position == 6


def test_a_filter_alone_leaves_groups_out_of_the_loss_and_its_denominators(base):
    plain = train(coarse(base, "optimizer.max_steps=1", name="plain"))
    run = train(coarse(base, "optimizer.max_steps=1", "algorithm.group_filter.equal_rewards=true", name="filtered"))
    (before,), (record,) = lines(plain, "metrics"), lines(run, "metrics")
    assert record["groups/kept_ratio"] < 1 and record["groups/rounds"] == 1
    assert record["reward"] == before["reward"] and "groups/rounds" not in before
    # advantages of the groups left out are 0 anyway: the gradient differs by the denominator alone
    logged = read_rollout(run.folder.rollouts, 1)
    tokens = [len(s.completion_ids) for s in logged.samples]
    live = sum(n for i, n in enumerate(tokens) if len(set(logged.rewards[i - i % 4 : i - i % 4 + 4])) > 1)
    assert record["grad_norm"] / before["grad_norm"] == pytest.approx(sum(tokens) / live, rel=1e-2)


def test_where_no_group_is_left_nothing_is_learned(base):
    config = coarse(base, "algorithm.group_filter.mean_reward=[2, 3]", "optimizer.max_steps=2", name="none-left")
    run = Run(config, "never")
    before = run.decoder.digests()
    assert run.train()
    assert [(r["groups/kept_ratio"], r["loss"], r["grad_norm"]) for r in lines(run, "metrics")] == [(0.0, 0.0, 0.0)] * 2
    assert run.decoder.digests() == before


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_trains_and_stays_exact(base, name):
    words = [f"algorithm.name={name}", "algorithm.num_iterations=2", "algorithm.beta=0.01", "optimizer.max_steps=2"]
    run = train(recipe(base, *words, name=f"algorithm-{name}"))
    records = lines(run, "metrics")
    assert [r["bit_wise/mismatched_tokens"] for r in records] == [0, 0]
    assert all(r["grad_norm"] > 0 and np.isfinite(r["loss"]) for r in records)
    assert run.config.algorithm.name == name
    assert [n for r in records for n in r if find(n) is None] == []
