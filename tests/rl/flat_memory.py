"""Resident memory of a run of 400 micro-batches and 50 weight updates: `python -m tests.rl.flat_memory`.

Linux only. After the first updates, whose buffers and caches stay, nothing may grow: a copy of the weights (FP32) kept
per update, or the logits of a micro-batch, would show as many times the bound.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.tiny_runs import recipe
from zerogap.rl.loop import Run
from zerogap.rl.observer import Observer
from zerogap.rl.rollout_log import read_rollout
from zerogap.train.packing import micro_batches, plan_packs

UPDATES = 50
SETTLED = 10  # updates after which memory is compared
MICRO_BATCHES = 400
MIB = 1024**2


def resident_bytes() -> int:
    """Of this process, as the kernel counts it."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) * 1024


class MemoryWatch(Observer):
    """Notes resident memory after every step."""

    def __init__(self) -> None:
        self.bytes: list[int] = []

    def step_done(self, record: Mapping[str, Any]) -> None:
        self.bytes.append(resident_bytes())


def watched_run(folder: Path) -> tuple[list[int], int, int]:
    """Resident memory after each update, micro-batches that were trained on, and the weights' bytes in FP32."""
    watch = MemoryWatch()
    sizes = (
        "numerics={preset: bf16, grad_bins: 8}",
        "optimizer.micro_batch_tokens=1024",
        "rollout.max_completion_length=16",
    )
    config = recipe(folder, f"optimizer.max_steps={UPDATES}", "eval.every=0", *sizes)
    run = Run(config, "never", watch)
    assert run.train()
    numerics, count = run.decoder.numerics, 0
    for step in range(1, UPDATES + 1):
        lengths = [sample.num_tokens for sample in read_rollout(run.folder.rollouts, step).samples]
        packs = plan_packs(lengths, numerics.grad_bins, numerics.pack_tokens)
        count += sum(len(list(micro_batches(bin_packs, config.optimizer.micro_batch_tokens))) for bin_packs in packs)
    weights = sum(handle.master.numel() * 4 for handle in run.trainer.handles)
    return watch.bytes, count, weights


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        resident, count, weights = watched_run(Path(name))
    print(f"{count} micro-batches, {len(resident)} weight updates, weights {weights / MIB:.2f} MiB in FP32")
    for step in (1, SETTLED, 20, 30, 40, UPDATES):
        print(f"after update {step:2d}: resident {resident[step - 1] / MIB:.2f} MiB")
    print(f"growth from update {SETTLED} to {UPDATES}: {(resident[-1] - resident[SETTLED - 1]) / MIB:.2f} MiB")


if __name__ == "__main__":
    main()
