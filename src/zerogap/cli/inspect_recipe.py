"""`zerogap inspect RECIPE`: what a run would take, from the recipe and the model's config alone: no weight is read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from zerogap.config import RunConfig
    from zerogap.models.advice import Change
    from zerogap.models.layout import Layout
    from zerogap.models.memory import MemoryPlan
    from zerogap.models.parameters import PartCount
    from zerogap.models.spec import ModelSpec


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a run is planned: a device, its memory, what is taken of it before a model is loaded, the layout."""

    device: str
    memory: int
    reserved: int
    layout: Layout

    @classmethod
    def of(cls, device: str, memory: str | None, devices: int | None, layout: str | None) -> Place:
        """From the command line's words."""
        from zerogap.models.devices import device_memory, reserved
        from zerogap.models.layout import Layout

        return cls(device, device_memory(device, memory), reserved(device), Layout.parse(layout, devices))

    @property
    def room(self) -> int:
        """Bytes that a run may take."""
        return self.memory - self.reserved


def recipe_spec(config: RunConfig) -> ModelSpec:
    """The recipe's model, by what is on this machine or packaged.

    Raises:
        ConfigError: it is neither, or a run would refuse the recipe for it.
    """
    from zerogap.errors import ConfigError
    from zerogap.models.published import PUBLISHED
    from zerogap.rl.setup import check_model
    from zerogap.weights.source import spec_at_hand

    spec = spec_at_hand(config.model)
    if spec is None:
        known = ", ".join(PUBLISHED)
        raise ConfigError("model", config.model, f"give a folder with its config.json; known without one are {known}")
    check_model(config, spec)
    return spec


def plan_facts(config: RunConfig, spec: ModelSpec, place: Place) -> dict[str, Any]:
    """Parameters, memory by part, and whether it fits, JSON-ready."""
    from zerogap.models.memory import memory_plan
    from zerogap.models.parameters import count_parameters

    plan = memory_plan(spec, config, place.layout)
    changes = [] if plan.total <= place.room else advice_for(config, spec, place)
    return {
        "device": {"name": place.device, "bytes": place.memory, "reserved": place.reserved},
        "layout": dataclasses.asdict(place.layout) | {"devices": place.layout.devices},
        "parameters_by_part": [dataclasses.asdict(count) for count in count_parameters(spec, plan.trained)],
        "memory": [dataclasses.asdict(part) for part in plan.parts],
        "activations_if_other_recompute": plan.other_activations,
        "total_bytes": plan.total,
        "fits": plan.total <= place.room,
        "changes": [dataclasses.asdict(change) for change in changes],
    }


def advice_for(config: RunConfig, spec: ModelSpec, place: Place) -> list[Change]:
    """What to change, where the run does not fit."""
    from zerogap.models.advice import advice

    return advice(spec, config, place.layout, place.room)


def print_plan(console: Console, config: RunConfig, spec: ModelSpec, place: Place) -> None:
    """Parameters, memory by part, verdict."""
    from zerogap.models.memory import memory_plan
    from zerogap.models.parameters import count_parameters

    plan = memory_plan(spec, config, place.layout)
    print_parameters(console, count_parameters(spec, plan.trained), config)
    print_memory(console, plan, config, place)
    changes = [] if plan.total <= place.room else advice_for(config, spec, place)
    print_verdict(console, plan, place, changes)


def print_parameters(console: Console, counts: Sequence[PartCount], config: RunConfig) -> None:
    """A line per part of the model, and their sums."""
    from zerogap.cli.inspect import print_lines
    from zerogap.models.parameters import total

    everything = total(list(counts))
    rows = [(c.part, f"{c.total:,}", f"{c.active:,}", f"{c.trained:,}") for c in [*counts, everything]]
    title = f"[bold]Parameters[/]: {_short(everything.total)}, {_short(everything.active)} active per token"
    title += f", {_short(everything.trained)} trained ({', '.join(config.trainable)})"
    print_lines(console, title, ("part", "parameters", "per token", "trained"), rows)


def print_memory(console: Console, plan: MemoryPlan, config: RunConfig, place: Place) -> None:
    """A line per part of the memory of one device."""
    from zerogap.cli.inspect import as_bytes, print_lines

    layout, optimizer = place.layout, config.optimizer
    rows = []
    for part in plan.parts:
        what = part.what
        if part.name == "activations":
            other = "with" if not optimizer.activation_recompute else "without"
            what += f"; {as_bytes(plan.other_activations)} {other} optimizer.activation_recompute"
        rows.append((part.name, as_bytes(part.bytes), what))
    rows += [("process", as_bytes(place.reserved), "before a model is loaded")]
    rows += [("all", as_bytes(plan.total + place.reserved), f"of {as_bytes(place.memory)}")]
    each = "" if layout.devices == 1 else f" on each of {layout.devices} devices ({layout})"
    print_lines(console, f"[bold]Memory[/]{each}: {place.device}", ("part", "bytes", "what"), rows)
    notes = []
    if layout.devices > 1 or place.device != "cpu":
        notes.append(
            "this version runs one process, on CPU; other devices and layouts are arithmetic, with the CPU's forms"
        )
    if layout.ep > 1:
        notes.append("experts are counted as evenly loaded")
    if config.contract().grad_bins % layout.dp:
        notes.append(f"dp={layout.dp} needs numerics.grad_bins={2 ** math.ceil(math.log2(layout.dp))}, or a multiple")
    for note in notes:
        console.print(f"note    {note}", markup=False, highlight=False, soft_wrap=True)


def print_verdict(console: Console, plan: MemoryPlan, place: Place, changes: Sequence[Change]) -> None:
    """Whether it fits, and what to change if not."""
    from zerogap.cli.inspect import as_bytes

    spare = place.room - plan.total
    console.print()
    if spare >= 0:
        console.print(f"[bold green]fits[/]: {as_bytes(spare)} to spare", highlight=False, soft_wrap=True)
        return
    console.print(f"[bold red]does not fit[/]: {as_bytes(-spare)} too much", highlight=False, soft_wrap=True)
    for change in changes:
        verdict = "fits" if change.fits else f"still {as_bytes(change.total - place.room)} too much"
        words, total = " ".join(change.words), as_bytes(change.total + place.reserved)
        console.print(f"change  {words}: {total}, {verdict}", markup=False, highlight=False, soft_wrap=True)
    if place.device == "cpu" and any("--devices" in word for change in changes for word in change.words):
        console.print("note    several devices are arithmetic: this version runs one process", soft_wrap=True)


def _short(count: int) -> str:
    """`135M`, `30.5B`."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)
