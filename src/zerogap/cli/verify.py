"""`zerogap verify`: climb the parity ladder on the user's own model and machine; write and check certificates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from zerogap.cli import certificate as certificates
from zerogap.cli.json_option import require_writable
from zerogap.cli.numerics_option import NUMERICS_HELP, contract_from

if TYPE_CHECKING:
    from zerogap.config import RunConfig
    from zerogap.numerics import Numerics

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
            help="A model folder (a tokenizer is needed for --certificate only), hub id, .gguf file, or "
            "smollm2-135m-instruct; or a recipe (.yaml), whose model and numerics are meant.",
            metavar="RECIPE_OR_MODEL",
        ),
    ] = None,
    numerics: Annotated[str | None, typer.Option(help=f"{NUMERICS_HELP} Default: the recipe's, or bf16.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results to this file.")] = None,
    inject: Annotated[
        str | None, typer.Option(help="Plant a fault first, to see its check turn red (see --list-faults).")
    ] = None,
    list_faults: Annotated[bool, typer.Option("--list-faults", help="Print the faults that can be planted.")] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="Native threads; changes no bit.")] = None,
    certificate: Annotated[
        Path | None,
        typer.Option(help="Also search for neighbours that change a bit, run and audit a short RL run, and write it."),
    ] = None,
    check: Annotated[Path | None, typer.Option(help="Run this certificate again and accept or refuse it.")] = None,
    elsewhere: Annotated[
        str | None, typer.Option("--model", help="With --check: where the model lies here. Default: as certified.")
    ] = None,
    sample: Annotated[float, typer.Option(help="With --check: the share of the certificate that is run.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of a certificate's random ids and neighbours; of --check's sample.")] = 0,
) -> None:
    """Check that rollout engine and trainer compute the same bits for a model on this machine.

    Runs the parity ladder: batch, packing, prefill, chunks, decoding, cache states, speculation, a second step after
    update and reload, and rollout against trainer over several optimizer steps. The exit code is 0 only when all checks
    are exact.

    --certificate FILE records what was compared, --check FILE runs such a record again, field by field.
    """
    from zerogap.errors import ConfigError
    from zerogap.ops.cpu import library

    console = Console()
    if list_faults:
        print_faults(console)
        return
    require_writable(json_file)
    with library.use_threads(threads or library.num_threads()):
        if check is not None:
            for name, given in (("MODEL", model), ("--certificate", certificate), ("--inject", inject)):
                if given is not None:
                    mend = "leave it out: --check runs what FILE names" + (" (or --model)" if name == "MODEL" else "")
                    raise ConfigError(name, str(given), mend)
            contract = contract_from(numerics) if numerics is not None else None
            facts = certificates.check(console, check, elsewhere, contract, sample, seed)
            good = facts["accepted"]
        else:
            for name, other in (("--model", elsewhere), ("--sample", None if sample == 1.0 else sample)):
                if other is not None:
                    raise ConfigError(name, other, "it belongs to --check FILE")
            if model is None:
                raise typer.BadParameter("give a model folder, hub id, .gguf file or recipe", param_hint="MODEL")
            require_writable(certificate, "--certificate")
            source, contract, recipe = _asked(model, numerics)
            if certificate is None:
                facts = _run(console, source, contract, inject)
            else:
                facts = certificates.write(console, certificate, source, contract, recipe, TEXTS, seed, inject)
            good = facts["exact"]
    if json_file is not None:
        json_file.write_text(json.dumps(facts, indent=1) + "\n")
        console.print(f"results: {json_file}")
    if not good:
        raise typer.Exit(1)


def print_faults(console: Console) -> None:
    """The faults that `--inject` plants."""
    from zerogap.verify.faults import FAULTS

    table = Table("fault", "check", "what is wrong", title="Faults that --inject plants")
    for fault in FAULTS.values():
        table.add_row(fault.name, str(fault.check), fault.text)
    console.print(table)


def _asked(model: str, numerics: str | None) -> tuple[str, Numerics, RunConfig | None]:
    """Model, contract and, where it was one, the recipe."""
    from zerogap.config import load_config

    if not model.endswith((".yaml", ".yml")):
        return model, contract_from(numerics or "bf16"), None
    recipe = load_config(model, [] if numerics is None else [f"numerics={numerics}"])
    return recipe.model, recipe.contract(), recipe


def _run(console: Console, model: str, contract: Numerics, inject: str | None) -> dict:
    from contextlib import nullcontext

    from zerogap.models.decoder import Decoder
    from zerogap.text import Tokenizer
    from zerogap.verify.faults import fault, planted
    from zerogap.verify.ladder import LADDER, climb, subject_for
    from zerogap.weights import open_model

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
