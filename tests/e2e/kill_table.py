"""Runs killed at chosen and at random moments, as a table: `python -m tests.e2e.kill_table [--seed N]`.

Each row is a run of its own in its own process, killed with SIGKILL once and started again. It must end with the
metrics and the weights of a run that nobody disturbed, bit for bit. Exit code 1 if one does not. An epoch has two steps
here.
"""

import argparse
import hashlib
import json
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen

from tests.e2e.test_killed_runs import SECONDS, digests, finish, lines, start, wait_for
from tests.tiny_runs import recipe, without_times

STEPS = 6
SETTINGS = (
    *(f"optimizer.max_steps={STEPS}", "checkpoint.every=1", "eval.every=2"),
    *("rollout.max_completion_length=24", "rollout.num_generations=8", "algorithm.num_iterations=2"),
)


def write_recipe(base: Path, name: str) -> Path:
    path = base / f"{name}.yaml"
    config = recipe(base, *SETTINGS, name=name)
    rows = [{"prompt": f"say {word}", "answer": word} for word in ("one", "two", "three", "four", "five", "six")]
    (base / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path.write_text(config.to_yaml())
    return path


def within_step(step: int, seconds: float) -> Callable[[Popen, Path], str]:
    """A kill so many seconds after the step before was logged."""

    def wait(process: Popen, folder: Path) -> str:
        wait_for(process, folder, step - 1)
        time.sleep(seconds)
        process.kill()
        return f"step {step}, {seconds * 1000:.0f} ms after the line of step {step - 1}"

    return wait


def during_save(step: int) -> Callable[[Popen, Path], str]:
    """A kill while the checkpoint of a step, or of the first later one that is caught, is being written."""

    def wait(process: Popen, folder: Path) -> str:
        wait_for(process, folder, step - 1)
        end = time.monotonic() + SECONDS
        while process.poll() is None and time.monotonic() < end:
            if list((folder / "checkpoints").glob(".checkpoint-*.partial/trainer.safetensors")):
                process.kill()
                process.wait()
                left = [path.name for path in (folder / "checkpoints").glob(".checkpoint-*.partial")]
                return f"during a save ({left[0]} was left)" if left else "during a save (it was just whole)"
            time.sleep(0.0002)
        raise SystemExit("no save was caught")

    return wait


def step_seconds(folder: Path) -> float:
    return sum(record["step_time"] for record in lines(folder, "metrics")) / STEPS


def weights_digest(folder: Path) -> str:
    return hashlib.sha256(json.dumps(digests(folder), sort_keys=True).encode()).hexdigest()[:16]


def row(base: Path, whole: Path, number: int, wait: Callable[[Popen, Path], str]) -> bool:
    """One killed run; prints its row and says whether it equals the whole one."""
    path, folder = write_recipe(base, f"killed-{number}"), base / f"killed-{number}"
    process = start(path)
    moment = wait(process, folder)
    process.communicate(timeout=SECONDS)
    logged = len(lines(folder, "metrics"))
    found = re.search(r"resumes with step (\d+)", finish(start(path)))
    same_lines = all(
        without_times(lines(folder, name)) == without_times(lines(whole, name))
        for name in ("metrics", "eval", "completions")
    )
    same_weights = digests(folder) == digests(whole)
    resumed = found.group(1) if found else "1"
    print(
        f"| {moment} | {logged} | {resumed} | {'yes' if same_lines else 'NO'} "
        f"| {weights_digest(folder)} {'equal' if same_weights else 'DIFFERENT'} |",
        flush=True,
    )
    return same_lines and same_weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    chance = random.Random(parser.parse_args().seed)
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        finish(start(write_recipe(base, "whole")))
        whole = base / "whole"
        mean = step_seconds(whole)
        print(f"whole run: {STEPS} steps of {mean:.2f} s on average, weights {weights_digest(whole)}\n")
        print("| killed | steps logged then | resumed with step | metrics, evaluations, completions equal | weights |")
        print("| --- | --- | --- | --- | --- |", flush=True)
        moments = [
            *(within_step(chance.randint(2, STEPS), chance.random() * mean) for _ in range(3)),
            during_save(3),
            within_step(4, chance.random() * mean),  # the last step of the second epoch
        ]
        equal = [row(base, whole, number, wait) for number, wait in enumerate(moments)]
    print(f"\n{sum(equal)} of {len(equal)} equal the whole run bit for bit")
    sys.exit(not all(equal))


if __name__ == "__main__":
    main()
