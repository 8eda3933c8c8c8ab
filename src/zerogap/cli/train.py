"""`zerogap train`: a run from a recipe."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    from zerogap.config import RunConfig
    from zerogap.rl.loop import Run
    from zerogap.rl.smoke import SmokeResult

SIGNALLED = 128  # and the number of the signal: the exit code of a run that was stopped, as shells have it


def train(
    recipe: Annotated[Path, typer.Argument(help="A recipe: a YAML file (see docs/recipe-keys.md).")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value words that replace keys.")] = None,
    resume: Annotated[
        str,
        typer.Option(
            help="auto: go on from the newest checkpoint in output_dir, if there is one. PATH: from that checkpoint. "
            "never: begin anew; what lies in output_dir is replaced."
        ),
    ] = "auto",
    smoke: Annotated[
        bool,
        typer.Option(
            "--smoke",
            help="Try the recipe in seconds: 2 random layers, 2 steps, a temporary folder; without its model and data.",
        ),
    ] = False,
) -> None:
    """Train a model with reinforcement learning, comparing rollout and trainer bit by bit in every step.

    Ctrl-C or SIGTERM ends the run after the phase at hand and saves a checkpoint; the exit code is 130 or 143. A second
    one ends it at once.
    """
    from zerogap.config import load_config

    config = load_config(recipe, overrides or [])
    console = Console()
    if smoke:
        try_recipe(config, resume, console)
        return
    from zerogap.cli.display import RunDisplay
    from zerogap.rl.loop import Run

    with console.status("reading data and model") if console.is_terminal else contextlib.nullcontext():
        run = Run(config, resume, RunDisplay(console))
    train_or_stop(run, console)
    console.print(f"model   {run.folder.model}", highlight=False, soft_wrap=True)
    print_summary(run, console)


def try_recipe(config: RunConfig, resume: str, console: Console) -> None:
    """The smoke run of a recipe; exit code 1 where an exact recipe shows a difference."""
    from zerogap.cli.display import RunDisplay
    from zerogap.errors import ConfigError
    from zerogap.rl.smoke import run_smoke

    if resume != "auto":
        raise ConfigError("--resume", resume, "leave it out: a smoke run begins anew in a temporary folder")
    result = run_smoke(config, RunDisplay(console))
    print_smoke(console, result)
    if not (result.exact or result.one_sided):
        raise typer.Exit(1)


def print_smoke(console: Console, result: SmokeResult) -> None:
    """What was run instead of the recipe, and whether it was exact."""
    small = result.config
    console.print()
    for note in result.notes:
        console.print(f"note    {note}", markup=False, highlight=False, soft_wrap=True)
    sides = small.contract().name + (f", rollout {small.rollout_contract().name}" if result.one_sided else "")
    correction = small.algorithm.correction
    parts = [
        f"{small.optimizer.max_steps} steps of AdamW, {result.completions} completions",
        f"numerics {sides}",
        f"loss {small.algorithm.loss_type}",
        *([f"correction {correction.kind}"] if result.one_sided else []),
        f"{result.seconds:.1f} s",
    ]
    console.print(f"smoke   {'; '.join(parts)}", markup=False, highlight=False, soft_wrap=True)
    counts = f"{result.mismatched:,} of {result.compared:,} log-probs differ between rollout and trainer"
    if result.one_sided:
        verdict = "[yellow]one-sided, not exact[/], as the recipe asks"
    elif result.exact:
        verdict = "[bold green]exact[/]"
    else:
        verdict = "[bold red]not exact[/]"
    console.print(f"{verdict}: {counts}", highlight=False, soft_wrap=True)


def train_or_stop(run: Run, console: Console) -> None:
    """Do the run. After Ctrl-C or SIGTERM: a checkpoint, a message, exit code 130 or 143."""
    received: list[int] = []
    try:
        with _stop_signals(run, console, received):
            finished = run.train()
    except KeyboardInterrupt:
        console.print("[yellow]ended at once[/]: the work since the last checkpoint is lost", highlight=False)
        raise typer.Exit(SIGNALLED + (received or [signal.SIGINT])[-1]) from None
    if not finished:
        saved = f"checkpoint in {run.folder.checkpoints}" if run.step else "nothing was trained yet"
        console.print(f"stopped after step {run.step}: {saved}", highlight=False, soft_wrap=True)
        console.print(f"go on   zerogap train {run.folder.config_file}", highlight=False, soft_wrap=True)
        raise typer.Exit(SIGNALLED + (received or [signal.SIGINT])[0])


def print_summary(run: Run, console: Console) -> None:
    """Where to look after a finished run."""
    from zerogap.cli.display import parity_text

    one_sided = run.trainer.one_sided
    counted = parity_text(run.mismatched_tokens, run.compared_tokens, one_sided)
    console.print(f"tokens  {counted} in {run.step} steps", highlight=False)
    console.print(f"report  {run.folder.report}", highlight=False, soft_wrap=True)
    if one_sided:
        return
    console.print(f"audit   zerogap audit {run.folder.path}", highlight=False, soft_wrap=True)


@contextlib.contextmanager
def _stop_signals(run: Run, console: Console, received: list[int]) -> Iterator[None]:
    """The first signal asks the run to stop, the second interrupts it. Their numbers are added to `received`."""

    def handle(number: int, frame: object) -> None:
        received.append(number)
        if run.stop_asked:
            raise KeyboardInterrupt
        run.ask_to_stop()
        console.print("[yellow]stopping after this phase; once more to end at once[/]")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
