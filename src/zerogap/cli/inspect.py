"""`zerogap inspect`: what a model is under a contract, what a recipe's run takes; from headers: no weight is read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from zerogap.cli.json_option import require_writable
from zerogap.cli.numerics_option import NUMERICS_HELP, contract_from

_EXPERT = re.compile(r"(\.experts\.)(\d+)")

if TYPE_CHECKING:
    from zerogap.cli.inspect_recipe import Place
    from zerogap.models.inventory import TensorForm
    from zerogap.models.spec import ModelSpec
    from zerogap.numerics import Numerics


def inspect(
    model: Annotated[
        str, typer.Argument(help="A model folder, hub id or .gguf file, or smollm2-135m-instruct; or a recipe (.yaml).")
    ],
    overrides: Annotated[list[str] | None, typer.Argument(help="Of a recipe: section.key=value words.")] = None,
    numerics: Annotated[str | None, typer.Option(help=f"{NUMERICS_HELP} A recipe has its own.")] = None,
    every: Annotated[
        bool, typer.Option("--all", help="List every tensor; otherwise equal layers share a line.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all of it to this file.")] = None,
    device: Annotated[str, typer.Option(help="Of a recipe: cpu, or a GPU to plan for, such as h100-80gb.")] = "cpu",
    memory: Annotated[
        str | None, typer.Option(help="Of a recipe: memory of a device, such as 24GB; otherwise what it has.")
    ] = None,
    devices: Annotated[int | None, typer.Option(help="Of a recipe: how many devices to plan for.")] = None,
    layout: Annotated[
        str | None, typer.Option(help="Of a recipe: how they split the model, such as tp=1,ep=8,dp=8.")
    ] = None,
) -> None:
    """Show what MODEL is under a numerics contract: sizes, every field of the contract, and the exact list of tensors
    that are quantised, with what stays as it is and why. Of a recipe also: parameters, memory by part, and whether it
    fits a device.

    Rollout and trainer both follow this list; checkpoints and saved weights carry it and are refused where it differs.
    """
    require_writable(json_file)
    if Path(model).suffix in (".yaml", ".yml"):
        from zerogap.cli.inspect_recipe import Place

        _refuse({"--numerics": numerics}, "a recipe has its own: add the word numerics=...")
        inspect_recipe(model, overrides or [], Place.of(device, memory, devices, layout), every, json_file)
        return
    given = {"--memory": memory, "--devices": devices, "--layout": layout, "overrides": overrides or None}
    _refuse(given | {"--device": None if device == "cpu" else device}, "only a recipe (.yaml) has a run to plan")
    inspect_model(model, contract_from(numerics or "bf16"), every, json_file)


def _refuse(given: Mapping[str, object], mend: str) -> None:
    from zerogap.errors import ConfigError

    for key, value in given.items():
        if value is not None:
            raise ConfigError(key, value, mend)


def inspect_recipe(recipe: str, overrides: Sequence[str], place: Place, every: bool, json_file: Path | None) -> None:
    """Model, tensors, parameters and memory of a recipe's run."""
    from zerogap.cli.inspect_recipe import plan_facts, print_plan, recipe_spec
    from zerogap.config import load_config
    from zerogap.models.inventory import inventory
    from zerogap.models.memory import memory_plan

    config = load_config(recipe, overrides)
    spec, contract = recipe_spec(config), config.contract()
    memory_plan(spec, config, place.layout)  # what cannot be honoured is refused before anything is printed
    forms, console = inventory(spec, contract), Console()
    print_model(console, config.model, config.model, spec, contract)
    print_tensors(console, forms, every, contract)
    console.print()
    print_totals(console, spec, contract, forms)
    print_plan(console, config, spec, place)
    facts = {"recipe": recipe, "model": config.model, **plan_facts(config, spec, place)}
    write_facts(console, json_file, facts | as_json(spec, contract, forms))


def inspect_model(model: str, contract: Numerics, every: bool, json_file: Path | None) -> None:
    """A model, and its tensors under a contract."""
    from zerogap.cli.display import print_facts
    from zerogap.models.inventory import inventory
    from zerogap.weights import open_model

    files = open_model(model)
    forms = inventory(files.spec, contract)
    console = Console()
    print_model(console, model, str(files.source), files.spec, contract)
    print_tensors(console, forms, every, contract)
    console.print()
    print_totals(console, files.spec, contract, forms)
    if files.stored_codes:
        print_facts(console, [("file", stored(files.stored_codes, forms))])
    facts = {"model": model, "source": str(files.source), "stored_codes": sorted(files.stored_codes)}
    write_facts(console, json_file, facts | as_json(files.spec, contract, forms))


def write_facts(console: Console, json_file: Path | None, facts: Mapping[str, Any]) -> None:
    """Write the file that `--json` names, if it names one."""
    if json_file is not None:
        json_file.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        console.print(f"written: {json_file}", highlight=False, soft_wrap=True)


# ---------------------------------------------------------------------------------------------------- for people


def print_model(console: Console, model: str, source: str, spec: ModelSpec, contract: Numerics) -> None:
    """Family, sizes, contract with every field, leaves."""
    from zerogap.cli.display import print_facts
    from zerogap.models.words import sizes

    fields = ", ".join(f"{key} {_shown(value)}" for key, value in contract.fields().items() if key != "name")
    facts = [
        ("model", f"{model} ({spec.family})" + ("" if source == model else f", from {source}")),
        ("sizes", ", ".join(sizes(spec))),
        ("numerics", f"{contract.name}, contract {contract.fingerprint()}"),
        ("contract", fields),
        ("leaves", ", ".join(f"{key} {value}" for key, value in leaves(spec, contract).items())),
    ]
    print_facts(console, facts)


def _shown(value: object) -> str:
    return ("none" if not value else " ".join(value)) if isinstance(value, list) else str(value)


def leaves(spec: ModelSpec, contract: Numerics) -> dict[str, int]:
    """Into how many parts each reduction is cut that a layout may split (docs/numerics.md)."""
    if spec.mla is None:
        found = {
            "attention": contract.head_leaves(spec.num_heads, spec.q_width),
            "KV": contract.head_leaves(spec.num_kv_heads, spec.kv_width),
        }
    else:
        found = {"attention": spec.mla.leaves(contract)}
    if spec.moe is None or spec.moe.dense_layers:
        found["MLP"] = contract.axis_leaves(spec.intermediate_size)
    if spec.moe is not None and spec.moe.shared_size:
        found["shared experts"] = contract.axis_leaves(spec.moe.shared_size)
    return found | {"vocabulary": -(-spec.vocab_size // contract.vocab_leaf_size(spec.vocab_size))}


def folded(forms: Sequence[TensorForm], every: bool) -> list[tuple[str, list[TensorForm]]]:
    """(label, tensors) per line of a table: tensors of equal role, shape and reason share one unless `every`."""
    from zerogap.models.words import ranges

    if every:
        return [(form.name, [form]) for form in forms]
    groups: dict[tuple, list[TensorForm]] = {}
    for form in sorted(forms, key=lambda f: (f.layer is not None, f.layer or 0)):
        role = form.name if form.layer is None else form.name.partition(f"layers.{form.layer}.")[2]
        role = _EXPERT.sub(r"\1*", role.removesuffix(".weight"))
        groups.setdefault((role, form.shape, form.why), []).append(form)
    lines = []
    for (role, _, _), group in groups.items():
        layers = sorted({f.layer for f in group if f.layer is not None})
        experts = sorted({int(found[2]) for f in group if (found := _EXPERT.search(f.name))})
        if experts:
            whole = len(group) == len(layers) * len(experts)
            role = role.replace("*", ranges(experts) if whole else f"({len(group)} of them)")
        lines.append((f"{role}, layer{'s' if len(layers) > 1 else ''} {ranges(layers)}" if layers else role, group))
    return lines


def print_tensors(console: Console, forms: Sequence[TensorForm], every: bool, contract: Numerics) -> None:
    """What is quantised, and what is not and why."""
    chosen, kept = [f for f in forms if f.quantised], [f for f in forms if not f.quantised]
    if chosen:
        print_quantised(console, chosen, every)
    print_kept(console, kept, every, contract)


def print_quantised(console: Console, forms: Sequence[TensorForm], every: bool) -> None:
    """What stands in FP8: bytes of codes and scales, against BF16."""
    rows = []
    for label, group in folded(forms, every):
        sizes = [sum(getattr(f, name) for f in group) for name in ("code_bytes", "scale_bytes", "plain_bytes")]
        rows.append((label, _shape(group[0]), *map(as_bytes, sizes)))
    print_lines(console, _title("Quantised", forms), ("tensor", "shape", "codes", "scales", "in BF16"), rows)


def print_kept(console: Console, forms: Sequence[TensorForm], every: bool, contract: Numerics) -> None:
    """What keeps the storage dtype, and why."""
    rows = []
    for label, group in folded(forms, every):
        rows.append((label, _shape(group[0]), as_bytes(sum(f.nbytes for f in group)), group[0].why))
    title = f"Stays {contract.storage.value.upper()}"
    print_lines(console, _title(title, forms), ("tensor", "shape", "bytes", "why"), rows)


def _title(name: str, forms: Sequence[TensorForm]) -> str:
    return f"[bold]{name}[/]: {len(forms):,} tensors, {sum(f.size for f in forms):,} parameters"


def print_lines(console: Console, title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A title, then aligned columns on whole lines: a name that is broken cannot be searched for."""
    console.print(f"\n{title}", highlight=False)
    left = {"tensor", "why", "part", "what"}
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for line, style in ((head, "dim"), *((row, None) for row in rows)):
        cells = [c.ljust(w) if name in left else c.rjust(w) for name, c, w in zip(head, line, widths, strict=True)]
        console.print("  ".join(cells).rstrip(), style=style, markup=False, highlight=False, soft_wrap=True)


def print_totals(console: Console, spec: ModelSpec, contract: Numerics, forms: Sequence[TensorForm]) -> None:
    """Bytes of all weights and of the KV cache, against BF16 where that is another number."""
    from zerogap.cli.display import print_facts
    from zerogap.models.cache import codec_of
    from zerogap.models.inventory import kv_bytes
    from zerogap.numerics import PRESETS

    weights, plain = sum(f.nbytes for f in forms), sum(f.plain_bytes for f in forms)
    cache, beside = kv_bytes(spec, contract)
    usual = sum(kv_bytes(spec, PRESETS["bf16"]))
    scales = f" ({as_bytes(cache)} codes, {as_bytes(beside)} scales)" if beside else ""
    facts = [
        ("weights", f"{as_bytes(weights)}, {sum(f.size for f in forms):,} parameters" + _against(weights, plain)),
        ("KV cache", f"{as_bytes(cache + beside)} per token{scales}" + _against(cache + beside, usual)),
    ]
    if contract.kv_scale == "calibrated":
        count = spec.num_layers * math.prod(codec_of(spec, contract).scale_shape)
        facts.append(("KV scales", f"{count} per weight version, calibrated"))
    print_facts(console, facts)


def stored(codes: Collection[str], forms: Sequence[TensorForm]) -> str:
    """What becomes of tensors that the file holds in block-FP8."""
    taken = [form for form in forms if form.quantised and form.name in codes]
    parts = [f"{len(codes)} tensors are stored in block-FP8"]
    if taken:
        parts.append(
            f"the codes of {len(taken)} are taken over as they are, if their scales have the contract's format"
        )
    if len(taken) < len(codes):
        parts.append(f"{len(codes) - len(taken)} are de-quantised: this contract does not quantise them")
    return "; ".join(parts)


def _against(size: int, bf16: int) -> str:
    return "" if size == bf16 else f"; in BF16 {as_bytes(bf16)} ({size / bf16:.1%})"


def _shape(form: TensorForm) -> str:
    return " x ".join(str(size) for size in form.shape)


def as_bytes(size: int) -> str:
    """`512 B`, `1.50 KiB`, `13.0 GiB`: three digits."""
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    digits = 0 if unit == "B" or value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f} {unit}"


# ---------------------------------------------------------------------------------------------------- for programs


def as_json(spec: ModelSpec, contract: Numerics, forms: Sequence[TensorForm]) -> dict[str, Any]:
    """All of it, every tensor by name."""
    import dataclasses

    from zerogap.models.inventory import kv_bytes

    cache, beside = kv_bytes(spec, contract)
    return {
        "spec": dataclasses.asdict(spec),
        "numerics": contract.fields(),
        "fingerprint": contract.fingerprint(),
        "leaves": leaves(spec, contract),
        "quantised": [form.name for form in forms if form.quantised],
        "parameters": sum(form.size for form in forms),
        "weight_bytes": sum(form.nbytes for form in forms),
        "plain_weight_bytes": sum(form.plain_bytes for form in forms),
        "kv_bytes_per_token": {"keys_and_values": cache, "scales": beside},
        "tensors": [{**dataclasses.asdict(form), "bytes": form.nbytes} for form in forms],
    }
