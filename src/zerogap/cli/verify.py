"""`zerogap verify`: climb the parity ladder on the user's own model and machine."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from zerogap.cli.json_option import require_writable
from zerogap.cli.numerics_option import NUMERICS_HELP, contract_from

# Real text for models that come with a tokenizer; models without one are verified on random ids alone.
TEXTS = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many clips did "
    "Natalia sell altogether in April and May?",
    "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n",
)


def verify(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A model folder (a tokenizer is not needed), hub id, .gguf file, or smollm2-135m-instruct."
        ),
    ] = None,
    numerics: Annotated[str, typer.Option(help=NUMERICS_HELP)] = "bf16",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results to this file.")] = None,
    inject: Annotated[
        str | None, typer.Option(help="Plant a fault first, to see its check turn red (see --list-faults).")
    ] = None,
    list_faults: Annotated[bool, typer.Option("--list-faults", help="Print the faults that can be planted.")] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="Native threads; changes no bit.")] = None,
) -> None:
    """Check that rollout engine and trainer compute the same bits for MODEL on this machine.

    Runs the parity ladder: batch, packing, prefill, chunks, decoding, cache states, a second step after update and
    reload, and rollout against trainer over several optimizer steps. The exit code is 0 only when all checks are exact.
    """
    from zerogap.verify.faults import FAULTS

    console = Console()
    if list_faults:
        table = Table("fault", "check", "what is wrong", title="Faults that --inject plants")
        for fault in FAULTS.values():
            table.add_row(fault.name, str(fault.check), fault.text)
        console.print(table)
        return
    if model is None:
        raise typer.BadParameter("give a model folder, hub id or .gguf file", param_hint="MODEL")
    require_writable(json_file)
    facts = _run(console, model, numerics, inject, threads)
    if json_file is not None:
        json_file.write_text(json.dumps(facts, indent=1) + "\n")
        console.print(f"results: {json_file}")
    if not facts["exact"]:
        raise typer.Exit(1)


def _run(console: Console, model: str, numerics: str, inject: str | None, threads: int | None) -> dict:
    from contextlib import nullcontext

    from zerogap.models.decoder import Decoder
    from zerogap.ops.cpu import library
    from zerogap.text import Tokenizer
    from zerogap.verify.faults import fault, planted
    from zerogap.verify.ladder import LADDER, climb, subject_for
    from zerogap.weights import open_model

    contract = contract_from(numerics)
    chosen = fault(inject) if inject else None
    files = open_model(model)
    with console.status(f"loading {model}"):
        decoder = Decoder(files.spec, contract, max_positions=512).load(files.tensors())
        names = files.tokenizer_files()
        texts = []
        if names:
            tokenizer = Tokenizer.from_files(names, files.chat_template)
            texts = [tokenizer.encode(text).tolist() for text in TEXTS]
    console.print(f"[bold]{model}[/]: {files.spec.family}, {files.spec.num_layers} layers, contract {contract.name}")
    console.print(f"identity {decoder.identity}, {'random ids and text' if texts else 'random ids (no tokenizer)'}")
    subject = subject_for(decoder, texts)
    results = []
    with (
        library.use_threads(threads or library.num_threads()),
        console.status("") as status,
        planted(chosen, subject) if chosen else nullcontext(subject) as climbed,
    ):
        steps = climb(climbed)
        for number in LADDER:
            status.update(f"check {number}: {LADDER[number][0]}")
            results.append(next(steps))
    table = Table("check", "what must be equal", "compared", "different", "seconds", "", title="Parity ladder")
    for r in results:
        verdict = "[green]exact[/]" if r.exact else "[bold red]DIFFERS[/]"
        table.add_row(str(r.number), r.name, f"{r.compared:,}", f"{r.differing:,}", f"{r.seconds:.1f}", verdict)
    console.print(table)
    for r in results:
        if not r.exact:
            console.print(f"[red]check {r.number}[/]: {r.first or 'nothing was compared'}", highlight=False)
    exact = all(r.exact for r in results)
    console.print("[bold green]all checks are exact[/]" if exact else "[bold red]not exact[/]")
    return {
        "model": model,
        "numerics": contract.fields(),
        "identity": str(decoder.identity),
        "injected": inject,
        "exact": exact,
        "checks": [{**vars(r), "exact": r.exact} for r in results],
    }
