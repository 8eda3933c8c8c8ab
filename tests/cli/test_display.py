"""The display shows what the run says, live on a terminal and as plain lines elsewhere, and a mismatch stands out."""

import io

import pytest
from rich.console import Console

from zerogap.cli.display import RunDisplay
from zerogap.rollout.progress import Progress

RECORD = {
    "reward": 0.25,
    "completions/mean_length": 17.5,
    "tokens_per_second": 1234.5,
    "step_time": 30.0,
    "bit_wise/compared_tokens": 1180,
    "bit_wise/mismatched_tokens": 0,
}


def shown(terminal: bool, mismatched: int = 0) -> str:
    out = io.StringIO()
    display = RunDisplay(
        Console(file=out, force_terminal=terminal, width=160, color_system="standard" if terminal else "auto")
    )
    display.started([("model", "tiny"), ("contract", "abc")], 1, 3)
    display.evaluated({"step": 0, "eval/accuracy": 0.5, "eval/num_prompts": 24.0, "eval/time": 1.0})
    display.phase(1, "rollout")
    display.rollout_progress(1, Progress(3, 64, 100, 0.5))
    display.step_done(RECORD | {"step": 1, "bit_wise/mismatched_tokens": mismatched})
    display.phase(2, "train")
    display.note("something to know")
    display.ended()
    display.ended()
    return out.getvalue()


def test_plain_lines_say_everything_and_nothing_moves():
    text = shown(terminal=False)
    assert "\x1b" not in text
    assert "\r" not in text
    for part in ("model", "tiny", "held-out accuracy 0.500 after step 0 (24 prompts", "something to know"):
        assert part in text
    (line,) = [line for line in text.splitlines() if line.startswith("step ")]
    assert line == (
        "step 1/3  reward 0.250  held-out 0.500  length 17.5  mismatched 0 of 1,180  1,234 tokens/s  30.0 s  "
        "left 1:00 min"
    )


def test_a_terminal_shows_phase_speed_mismatches_and_time_left():
    text = shown(terminal=True)
    assert "\x1b" in text
    assert "step 2: train" in text
    assert "1:00 min left" in text
    assert "mismatched 0 of 1,180 tokens" in text


@pytest.mark.parametrize(("mismatched", "colour"), [(0, "\x1b[32m"), (2, "\x1b[31m")])
def test_the_count_of_mismatched_tokens_is_green_or_red(mismatched, colour):
    assert f"{colour}{mismatched}\x1b[0m of 1,180" in shown(terminal=True, mismatched=mismatched)
