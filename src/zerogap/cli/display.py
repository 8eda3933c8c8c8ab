"""What people see of a run: its facts, a live progress line, a line per step; plain lines without a terminal."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table

from zerogap.rl.metrics import ONE_SIDED
from zerogap.rl.observer import Observer

if TYPE_CHECKING:
    from zerogap.rollout.progress import Progress as RolloutProgress

RECENT_STEPS = 5  # whose median time tells the time left


def as_time(seconds: float) -> str:
    """`45 s`, `6:05 min`, `2:10 h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60}:{whole % 60:02d} min" if whole < 3600 else f"{whole // 3600}:{whole % 3600 // 60:02d} h"


def print_facts(console: Console, facts: Sequence[tuple[str, str]]) -> None:
    """Label and text of each fact, the text wrapped beside its label."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in facts:
        table.add_row(label, text)
    console.print(table, highlight=False)


def parity_text(mismatched: int, compared: int, one_sided: bool) -> str:
    """How many log-probs differ between rollout and trainer; a one-sided run is never called exact."""
    if one_sided:
        return f"[yellow]one-sided, not exact[/]: differing {mismatched:,} of {compared:,}"
    return f"mismatched [{'red' if mismatched else 'green'}]{mismatched:,}[/] of {compared:,}"


class RunDisplay(Observer):
    """Shows a run on a console. Mutated by the run's calls."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live: Progress | None = None
        self._task: TaskID | None = None
        self._max_steps = self._step = self._compared = self._mismatched = 0
        self._accuracy: float | None = None
        self._one_sided = False
        self._times: list[float] = []
        self._phase = ""

    def started(self, facts: Sequence[tuple[str, str]], first_step: int, max_steps: int) -> None:
        print_facts(self.console, facts)
        self.console.print()
        self._max_steps = max_steps
        if first_step > max_steps:
            self.console.print(f"resumes after the last of {max_steps} steps: only the model is left to write")
        elif first_step > 1:
            self.console.print(f"resumes with step {first_step} of {max_steps}")
        if not self.console.is_terminal:
            return
        columns = (
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.description}"),
        )
        self._live = Progress(*columns, console=self.console, transient=True)
        self._task = self._live.add_task("", total=max_steps, completed=first_step - 1)
        self._live.start()

    def phase(self, step: int, name: str) -> None:
        self._phase = f"step {step}: {name}"
        self._describe("")

    def rollout_progress(self, step: int, progress: RolloutProgress) -> None:
        speed = f"{progress.tokens_per_second:,.0f} tokens/s"
        self._describe(f" {progress.finished}/{progress.total} completions, {speed}")

    def _describe(self, detail: str) -> None:
        if self._live is None or self._task is None:
            return
        parts = [f"{self._phase}{detail}"]
        if self._compared:
            counted = "one-sided, not exact: differing" if self._one_sided else "mismatched"
            parts.append(f"{counted} {self._mismatched:,} of {self._compared:,} tokens")
        if self._times:
            parts.append(f"{as_time(self._left())} left")
        self._live.update(self._task, description="  ".join(parts))

    def _left(self) -> float:
        return statistics.median(self._times[-RECENT_STEPS:]) * (self._max_steps - self._step)

    def step_done(self, record: Mapping[str, Any]) -> None:
        self._step = record["step"]
        self._times.append(record["step_time"])
        compared, mismatched = record["bit_wise/compared_tokens"], record["bit_wise/mismatched_tokens"]
        self._compared += compared
        self._mismatched += mismatched
        self._one_sided = bool(record.get(ONE_SIDED))
        parity = parity_text(mismatched, compared, self._one_sided)
        width = len(str(self._max_steps))
        accuracy = "" if self._accuracy is None else f"  held-out {self._accuracy:.3f}"
        self.console.print(
            f"step {self._step:>{width}}/{self._max_steps}  reward {record.get('reward', float('nan')):.3f}{accuracy}  "
            f"length {record['completions/mean_length']:.1f}  {parity}  "
            f"{record['tokens_per_second']:,.0f} tokens/s  {record['step_time']:.1f} s  left {as_time(self._left())}",
            highlight=False,
            soft_wrap=True,
        )
        if self._live is not None and self._task is not None:
            self._live.update(self._task, completed=self._step)

    def evaluated(self, record: Mapping[str, Any]) -> None:
        self._accuracy = record["eval/accuracy"]
        by = " by the one-sided rollout" if record.get(ONE_SIDED) else ""
        self.console.print(
            f"held-out accuracy [bold]{self._accuracy:.3f}[/] after step {record['step']} "
            f"({record['eval/num_prompts']:.0f} prompts{by}, {record['eval/time']:.1f} s)",
            highlight=False,
        )

    def note(self, text: str) -> None:
        self.console.print(f"[yellow]{text}[/]", highlight=False)

    def ended(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
