"""Alarms are raised when they should be, and not at every step again."""

import math

import pytest

from tests.tiny_runs import recipe
from zerogap.rl.alarms import FLAT, Alarms
from zerogap.rl.loop import Run
from zerogap.rl.observer import Observer
from zerogap.rl.process_memory import process_memory


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_named(value):
    assert Alarms().of_step({"step": 4, "loss": 1.0, "entropy": value}) == [f"step 4: not finite: entropy {value}"]
    assert Alarms().of_step({"step": 4, "loss": 1.0, "note": "nan"}) == []


def test_flat_groups_are_said_after_3_6_and_12_steps_in_a_row():
    alarms = Alarms()
    assert [s for s in range(1, 25) if alarms.of_step({"step": s, FLAT: 1.0})] == [3, 6, 12, 24]
    assert alarms.of_step({"step": 25, FLAT: 0.9}) == []
    assert [s for s in range(26, 30) if alarms.of_step({"step": s, FLAT: 1.0})] == [28]
    assert not any(Alarms().of_step({"step": s}) for s in range(9)), "a run without the figure has no flat groups"


def test_a_run_whose_reward_is_the_same_for_all_says_so(tmp_path):
    class Notes(Observer):
        def __init__(self):
            self.texts = []

        def note(self, text):
            self.texts.append(text)

    config = recipe(tmp_path)
    (tmp_path / "reward.py").write_text("def even_ids(completions, **columns):\n    return [0.5] * len(completions)\n")
    notes = Notes()
    assert Run(config, "never", notes).train()
    (text,) = [text for text in notes.texts if "equal rewards" in text]
    assert text.startswith("step 3: in each of the last 3 steps every group")


def test_memory_is_read_from_what_the_kernel_says(tmp_path):
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmHWM:\t  3145728 kB\nVmRSS:\t 1572864 kB\nThreads:\t1\n")
    assert process_memory(status) == {"memory/peak": 3.0, "memory/resident": 1.5}
    assert process_memory(tmp_path / "nowhere") == {}
