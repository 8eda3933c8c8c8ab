"""What `zerogap verify --certificate FILE` and `--check FILE` show: progress, what was compared, a table of fields."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from zerogap.config import RunConfig
    from zerogap.numerics import Numerics
    from zerogap.verify.recheck import Checked

SHOWN = 12  # refused or incomparable fields of one kind that are printed
COLOURS = {"accepted": "green", "refused": "bold red", "not comparable": "yellow"}


def write(
    console: Console,
    file: Path,
    model: str,
    contract: Numerics,
    recipe: RunConfig | None,
    texts: Sequence[str],
    seed: int,
    inject: str | None,
) -> dict[str, Any]:
    """Make a certificate; without objections it is written. Returns plain facts, `exact` among them."""
    from zerogap.cli.display import as_time
    from zerogap.verify.certificate import write_certificate
    from zerogap.verify.certify import certify, objections
    from zerogap.verify.faults import fault

    planted = fault(inject) if inject else None
    console.print(f"certifying [bold]{model}[/], contract {contract.name} ({contract.fingerprint()})", highlight=False)
    with _progress(console) as told:
        record = certify(
            model,
            contract,
            recipe=recipe,
            texts=texts,
            seed=seed,
            fault=planted,
            progress=told,
        )
    console.print(f"identity {'@'.join(list(record['identity'].values())[:2])}#{record['identity']['build']}")
    console.print(_parts(record))
    found = objections(record)
    for field, problem in found:
        console.print(f"[red]{field}[/]: {problem}", highlight=False)
    facts = {"model": model, "exact": not found, "objections": dict(found), "injected": inject}
    if found or planted is not None:
        what = "the model is not exact here" if found else "the fault was not found"
        kept = ", the older one is as it was" if file.exists() else ""
        console.print(f"[bold red]no certificate[/]: {what}{kept}", highlight=False)
        return facts | {"exact": False}
    sealed = write_certificate(file, record)
    seconds = as_time(record["made"]["seconds"]["all"])
    console.print(f"[bold green]exact[/], certified in {seconds}: {file}", highlight=False, soft_wrap=True)
    console.print(f"seal {sealed['seal']}", highlight=False)
    return facts | {"certificate": str(file), "seal": sealed["seal"]}


def _parts(record: dict[str, Any]) -> Table:
    """What was compared, part by part."""
    table = Table("part", "what was held against what", "compared", "different", "seconds", title="Certificate")
    seconds, near = record["made"]["seconds"], record["neighbours"]
    rows = [
        ("neighbours", f"{near['trials']} compositions around {len(near['victims'])} sequences against each one alone",
         near["compared"], near["differing"]),
        ("ladder", f"{len(record['ladder'])} checks of the parity ladder",
         sum(c["compared"] for c in record["ladder"]), sum(c["differing"] for c in record["ladder"])),
        ("run", f"{len(record['run']['steps'])} steps of RL: rollout's log-probs against the trainer's",
         sum(s["compared"] for s in record["run"]["steps"]), sum(s["mismatched"] for s in record["run"]["steps"])),
        ("audit", "their tokens three times again, from saved weights, under other conditions",
         3 * sum(s["tokens"] for s in record["audit"]),
         sum(s[path] for s in record["audit"] for path in ("trainer", "engine", "redrawn", "experts"))),
    ]  # fmt: skip
    for part, what, compared, differing in rows:
        table.add_row(part, what, f"{compared:,}", f"{differing:,}", f"{seconds.get(part, 0.0):.1f}")
    return table


def check(
    console: Console, file: Path, model: str | None, contract: Numerics | None, sample: float, seed: int
) -> dict[str, Any]:
    """Run a certificate again and print the table of fields. Returns plain facts, `accepted` among them."""
    from zerogap.cli.display import as_time
    from zerogap.verify import recheck
    from zerogap.verify.certificate import read_certificate

    record = read_certificate(file)
    began = time.perf_counter()
    name, source = record["identity"]["contract"], record["model"]["source"]
    what = "all of it" if sample == 1.0 else f"a sample of {sample:g} (seed {seed})"
    console.print(f"checking [bold]{file}[/]: {model or source}, contract {name}, {what}", highlight=False)
    with _progress(console) as told:
        result = recheck.check(
            record,
            model=model,
            numerics=contract,
            sample=sample,
            seed=seed,
            progress=told,
        )
    print_fields(console, result)
    verdict = "[bold red]refused[/]"
    if result.accepted and result.partly:
        verdict = "[bold yellow]accepted in part[/]: all equalities hold here, bits of another class stand apart"
    elif result.accepted:
        verdict = "[bold green]accepted[/]"
    tail = f"{result.compared:,} numbers compared, {as_time(time.perf_counter() - began)}"
    console.print(f"{verdict}; {tail}", highlight=False)
    return {"certificate": str(file), **result.as_json()}


def print_fields(console: Console, result: Checked) -> None:
    """The table of fields; of long lists of refused ones the first, and how many more there are."""
    table = Table(title="Certificate, field by field")
    for name in ("field", "certified", "here", "verdict"):
        table.add_column(name, overflow="fold")
    counts: dict[tuple[str, str], int] = {}
    for line in result.lines:
        kind = (line.field.partition(".")[0].partition("[")[0], line.verdict)
        counts[kind] = counts.get(kind, 0) + 1
        if counts[kind] <= SHOWN or line.verdict in ("accepted", "other, allowed"):
            colour = COLOURS.get(line.verdict, "dim")
            table.add_row(line.field, _cut(line.certified), _cut(line.here), f"[{colour}]{line.verdict}[/]")
    console.print(table, highlight=False, markup=True)
    for (part, verdict), count in counts.items():
        if count > SHOWN and verdict not in ("accepted", "other, allowed"):
            console.print(f"... and {count - SHOWN} more fields of {part} are {verdict} (all: --json)", highlight=False)
    for note in result.notes:
        console.print(f"note: {note}", highlight=False, markup=False)


def _cut(text: str) -> str:
    from rich.markup import escape

    return escape(text if len(text) <= 160 else f"{text[:157]}...")


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[str, str], None]]:
    """A live line on a terminal; a line per part elsewhere."""
    from zerogap.cli.display import as_time

    began = time.perf_counter()
    if not console.is_terminal:

        def plain(part: str, text: str) -> None:
            if not text:
                console.print(f"{as_time(time.perf_counter() - began)}: {part}", highlight=False)

        yield plain
        return
    with console.status("") as status:
        yield lambda part, text: status.update(
            f"{part}{f': {text}' if text else ''}  [dim]{as_time(time.perf_counter() - began)}[/]"
        )
