"""A run in its own process, killed without warning or asked to end: resumed, it has the bits of one that was not."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tiny_runs import recipe, without_times
from zerogap.rl.run_folder import RunFolder
from zerogap.verify.audit import audit_run

STEPS = 3
SETTINGS = (f"optimizer.max_steps={STEPS}", "checkpoint.every=1", "eval.every=2", "logging.audit_every=1")
SECONDS = 120


def write_recipe(base: Path, name: str, *more: str) -> Path:
    path = base / f"{name}.yaml"
    path.write_text(recipe(base, *SETTINGS, *more, name=name).to_yaml())
    return path


def start(path: Path, *words: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "zerogap", "train", str(path), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment())


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "200"}


def finish(process: subprocess.Popen) -> str:
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, output
    return output


def lines(folder: Path, name: str) -> list[dict]:
    path = folder / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(process: subprocess.Popen, folder: Path, step: int) -> None:
    """Until the run has logged the step."""
    path, end = folder / "metrics.jsonl", time.monotonic() + SECONDS
    while process.poll() is None and time.monotonic() < end:
        if path.exists() and f'"step": {step},' in path.read_text():
            return
        time.sleep(0.002)
    output, _ = process.communicate(timeout=SECONDS)
    pytest.fail(f"step {step} was not logged while the run lived:\n{output}")


def digests(folder: Path) -> dict[str, str]:
    return json.loads((folder / "model" / "zerogap.json").read_text())["digests"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tmp_path_factory.mktemp("killed")


@pytest.fixture(scope="module")
def whole(base):
    """The run that nobody disturbed."""
    finish(start(write_recipe(base, "whole")))
    return base / "whole"


@pytest.mark.slow
def test_killed_after_every_step_it_ends_with_the_same_bits(base, whole):
    path, folder = write_recipe(base, "killed"), base / "killed"
    for step in range(1, STEPS + 1):
        process = start(path)
        wait_for(process, folder, step)
        process.kill()
        process.communicate(timeout=SECONDS)
    if not (folder / "model").exists():  # the last kill may have come after the run was whole
        finish(start(path))
    assert digests(folder) == digests(whole)
    for name in ("metrics", "eval"):
        assert without_times(lines(folder, name)) == without_times(lines(whole, name)), name
    assert lines(folder, "completions") == lines(whole, "completions")
    assert [s.differences for s in audit_run(folder).steps] == [0] * STEPS
    again = start(path)
    output, _ = again.communicate(timeout=SECONDS)
    assert again.returncode == 2
    assert "finished" in output


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_a_checkpoint_and_says_how_to_go_on(base, whole, number, code):
    name = f"asked-{code}"
    path, folder = write_recipe(base, name, "checkpoint.every=0"), base / name
    process = start(path)
    wait_for(process, folder, 1)
    process.send_signal(number)
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == code, output
    assert "stopped after step" in output
    assert f"zerogap train {folder}/config.yaml" in output
    assert len(list(RunFolder(folder).checkpoints.glob("checkpoint-*"))) == 1
    done = len(lines(folder, "metrics"))
    output = finish(start(folder / "config.yaml"))
    assert f"resumes with step {done + 1} of {STEPS}" in output
    compared = sum(record["bit_wise/compared_tokens"] for record in lines(folder, "metrics"))
    assert f"tokens  mismatched 0 of {compared:,} in {STEPS} steps" in output
    assert digests(folder) == digests(whole)
    assert without_times(lines(folder, "metrics")) == without_times(lines(whole, "metrics"))


@pytest.mark.slow
def test_a_checkpoint_can_be_carried_to_another_folder(base, whole):
    path, folder = write_recipe(base, "carried"), base / "carried"
    output = finish(start(path, "--resume", str(whole / "checkpoints" / "checkpoint-2")))
    assert "resumes with step 3 of 3" in output
    assert digests(folder) == digests(whole)
    assert without_times(lines(folder, "metrics")) == without_times(lines(whole, "metrics"))[2:]


@pytest.mark.slow
def test_a_second_signal_ends_at_once(base):
    path = write_recipe(base, "hurried")
    begun = base / "begun"
    code = f"import pathlib, time\n\n\ndef slow(completions, **columns):\n    pathlib.Path({str(begun)!r}).touch()\n"
    (base / "slow.py").write_text(f"{code}    time.sleep({SECONDS})\n")
    process = start(path, f"reward.functions=[{base}/slow.py:slow]", "eval.every=0", "data.eval=null")
    end = time.monotonic() + SECONDS
    while not begun.exists() and time.monotonic() < end:
        time.sleep(0.01)
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 143, output
    assert "ended at once" in output


def test_plain_lines_without_a_terminal(base, whole):
    output = finish(start(write_recipe(base, "plain"), "optimizer.max_steps=1", "--resume", "never"))
    (step,) = [line for line in output.splitlines() if line.startswith("step ")]
    for word in ("step 1/1", "reward 0.", "mismatched 0 of ", "tokens/s", "length "):
        assert word in step
    for word in ("contract", "identity", "trainable", "held-out accuracy", "report ", "audit ", "0 of "):
        assert word in output
    assert "\x1b" not in output
