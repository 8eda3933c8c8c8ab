"""`zerogap audit`: hold a run's logged log-probs against its saved weights."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from zerogap.cli.json_option import require_writable

if TYPE_CHECKING:
    from zerogap.verify.audit import AuditResult

SHOWN = 8  # lines of a list that are printed


def audit(
    run: Annotated[Path, typer.Argument(help="The folder of a run (its output_dir).")],
    steps: Annotated[
        str | None, typer.Option(help="Steps to audit, as in 1,4,10-12. Default: all whose weights were saved.")
    ] = None,
    page_size: Annotated[int | None, typer.Option(min=16, help="Page size; default: another than the run's.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Native threads; default: another number.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results to this file.")] = None,
) -> None:
    """Compute logged log-probs again from the saved weights, with another page size, thread count and batch order.

    Digests of all weights are checked first. The exit code is 0 only if something was compared and nothing differs.
    """
    from zerogap.verify.audit import AuditSettings, audit_run

    require_writable(json_file)
    console = Console()
    chosen = parse_steps(steps) if steps is not None else None
    with console.status("recomputing log-probs") if console.is_terminal else contextlib.nullcontext() as status:

        def show(found: object) -> None:
            if status is not None:
                step = getattr(found, "step", None)
                status.update(f"step {step} done" if step else "weights read, recomputing log-probs")

        result = audit_run(run, chosen, AuditSettings(page_size, threads), show)
    print_result(console, run, result)
    if json_file is not None:
        json_file.write_text(json.dumps(result.as_json(), indent=1) + "\n", encoding="utf-8")
    if not result.exact:
        raise typer.Exit(1)


def parse_steps(text: str) -> list[int]:
    """`1,4,10-12` as step numbers.

    Raises:
        ConfigError: another form.
    """
    from zerogap.errors import ConfigError

    steps: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ConfigError("--steps", text, "write step numbers and ranges, as in 1,4,10-12")
        steps += range(int(first), int(last if dash else first) + 1)
    return steps


def print_result(console: Console, run: Path, result: AuditResult) -> None:
    """Weights, a table of steps, what is not covered, and the verdict."""
    for note in result.notes:
        console.print(note, highlight=False)
    for weights in result.weights:
        where = f"weights of version {weights.version}"
        if weights.damaged:
            console.print(f"[red]{where} cannot be read[/]: {weights.damaged}", highlight=False)
        elif weights.changed:
            names = ", ".join(weights.changed[:SHOWN])
            console.print(f"[red]{where}: {len(weights.changed)} digests differ[/]: {names}", highlight=False)
        else:
            console.print(f"{where}: {weights.tensors} digests equal", highlight=False)
    routed = any(done.routed or done.experts for done in result.steps)
    columns = ("trainer", "engine", "redrawn", *(("experts",) if routed else ()))
    table = Table("step", "version", "tokens", *columns, "", title=f"Audit of {run}: differing log-probs")
    for done in result.steps:
        counts = [getattr(done, name) for name in columns]
        cells = [f"[red]{count:,}[/]" if count else "0" for count in counts]
        verdict = "[bold red]DIFFERS[/]" if done.differences else "[green]exact[/]"
        table.add_row(str(done.step), str(done.version), f"{done.tokens:,}", *cells, verdict)
    if result.steps:
        console.print(table)
    for done in result.steps:
        if done.differences:
            console.print(f"[red]step {done.step}[/], first difference: {done.first}", highlight=False)
    for step, why in result.not_covered[:SHOWN]:
        console.print(f"step {step} is not covered: {why}", highlight=False)
    if len(result.not_covered) > SHOWN:
        console.print(f"... and {len(result.not_covered) - SHOWN} more steps are not covered", highlight=False)
    if result.exact:
        console.print(f"[bold green]exact[/]: {result.tokens:,} tokens compared three times, 0 differences")
    else:
        found = f"{result.differences:,} differences, {result.tokens:,} tokens compared"
        console.print(f"[bold red]not exact[/]: {found if result.tokens else 'nothing could be compared'}")
