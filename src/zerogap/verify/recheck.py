"""Running a certificate again, anywhere: accepted or refused field by field.

First what costs little: the seals, what the record says of itself, contract, identity, model, tokenizer, weights. Only
where all of that holds is anything computed: neighbours, ladder, the RL run and its audit, in full or on a sample that
a seed draws. On the same backend class all digests must come out the same. On another one bits may differ by design, so
digests of what was computed are not compared, but everything that must be equal within one machine is.
"""

import dataclasses
import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zerogap.errors import CheckpointError, ConfigError, ContractError, ZerogapError
from zerogap.numerics import Numerics
from zerogap.ops import backend
from zerogap.verify.audit import AuditResult
from zerogap.verify.certificate import Record, as_ids, broken_seals
from zerogap.verify.certify import (
    Clock,
    Opened,
    Progress,
    audit,
    audit_entries,
    climb_ladder,
    hardware,
    model_facts,
    objections,
    open_loaded,
    search_neighbours,
    versions,
)
from zerogap.verify.checks import Subject
from zerogap.verify.ladder import LADDER, subject_for
from zerogap.verify.short_run import ShortRun, run_short

ACCEPTED, REFUSED, APART, OTHER, LEFT = "accepted", "refused", "not comparable", "other, allowed", "not run"
KV_SCALES = "kv_scales"  # of the digests: known only once a run has calibrated


@dataclasses.dataclass(frozen=True)
class Line:
    """One field: what the certificate says, what is found here, and what follows (`ACCEPTED`, `REFUSED`, `APART`: bits
    of another backend class, `OTHER`: differs and may, `LEFT`: not run)."""

    field: str
    certified: str
    here: str
    verdict: str


@dataclasses.dataclass
class Checked:
    """What running a certificate again has shown. Grows while it runs.

    Attributes:
        lines: field by field, in order.
        notes: what people should know.
        compared: numbers compared between two ways to the same ones.
        sample: the share that was run.
    """

    sample: float
    lines: list[Line] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    compared: int = 0

    @property
    def sound(self) -> bool:
        """True if nothing is refused so far."""
        return not any(line.verdict == REFUSED for line in self.lines)

    @property
    def accepted(self) -> bool:
        """True if no field is refused and the record's checks were run here."""
        return self.sound and self.compared > 0

    @property
    def partly(self) -> bool:
        """True if bits of another backend class could not be compared."""
        return any(line.verdict == APART for line in self.lines)

    def add(self, field: str, certified: object, here: object, verdict: str | None = None) -> bool:
        """Note a field; without a verdict equal texts are accepted and others refused. True unless refused."""
        texts = str(certified), str(here)
        verdict = verdict or (ACCEPTED if texts[0] == texts[1] else REFUSED)
        self.lines.append(Line(field, *texts, verdict))
        return verdict != REFUSED

    def as_json(self) -> Record:
        """Plain facts."""
        return {"accepted": self.accepted, "partly": self.partly} | dataclasses.asdict(self)


def check(
    record: Mapping[str, Any],
    *,
    model: str | None = None,
    numerics: Numerics | None = None,
    sample: float = 1.0,
    seed: int = 0,
    progress: Progress = lambda part, text: None,
) -> Checked:
    """Run a certificate again.

    Args:
        record: as `read_certificate` gives it.
        model: where the model lies here; None: what the certificate names.
        numerics: the contract that the caller expects; None: the certificate's.
        sample: share of trials, checks and steps that are run, above 0; 1: all.
        seed: draws the sample.
    """
    if not 0.0 < sample <= 1.0:
        raise ConfigError("--sample", sample, "choose a share above 0, and at most 1: all")
    result = Checked(sample)
    opened = _opened(record, model, numerics, result, progress)
    parts = ("neighbours", "ladder", "run", "weights after updates", "audit")
    if opened is None:
        for name in parts:
            result.add(name, "certified", "not run, since a field above is refused", LEFT)
        return result
    here = _Here(record, result, _Draw(sample, seed), Clock(progress), opened.decoder.identity.backend)
    subject = _subject(record, opened)
    try:
        _neighbours(here, subject)
        _ladder(here, subject)
        source = opened.source
        del opened, subject
        _run(here, source)
    except ZerogapError as error:
        result.add("running it", "no error", f"{type(error).__name__}: {error}", REFUSED)
    return result


# ---------------------------------------------------------------------------------------------------- what costs little


def _opened(
    record: Mapping[str, Any],
    model: str | None,
    numerics: Numerics | None,
    result: Checked,
    progress: Progress,
) -> Opened | None:
    """The model, loaded, if every field so far is accepted."""
    progress("model", "")
    broken = broken_seals(record)
    result.add("seal", record["seal"][:16], f"broken: {', '.join(broken)}" if broken else record["seal"][:16])
    for field, problem in objections(record):
        result.add(field, problem, "a certificate has no differences", REFUSED)
    contract = _contract(record, numerics, result)
    _recipe(record, result)
    for name, ours in versions().items():
        theirs = record["versions"][name]
        result.add(f"versions.{name}", theirs, ours, ACCEPTED if theirs == ours else OTHER)
    theirs, ours = (" ".join([h["machine"], *h["flags"]]) for h in (record["hardware"], hardware()))
    result.add("hardware", theirs, ours, ACCEPTED if theirs == ours else OTHER)
    if contract is None or not result.sound:
        return None
    source = model or record["model"]["source"]
    try:
        opened = open_loaded(source, contract)
    except (ConfigError, CheckpointError) as error:
        result.add("model", record["model"]["source"], f"{source}: {error}", REFUSED)
        return None
    _model(record, opened, result)
    _weights(record, opened, result)
    _sequences(record, opened, result)
    return opened if result.sound else None


def _contract(record: Mapping[str, Any], asked: Numerics | None, result: Checked) -> Numerics | None:
    """The certificate's contract, if this build computes it and the caller did not expect another one."""
    certified, identity = record["identity"]["contract"], record["identity"]
    try:
        contract = Numerics.from_fields(record["contract"])
    except (ContractError, ConfigError) as error:
        result.add("identity.contract", certified, f"not a contract of this build: {error}", REFUSED)
        return None
    if contract.fingerprint() != certified:
        result.add("identity.contract", certified, f"the certificate's fields make {contract.fingerprint()}", REFUSED)
        return None
    if asked is not None and asked.fingerprint() != certified:
        ours, theirs = asked.fields(), contract.fields()
        first = next(f"{k} {ours[k]!r}, not {theirs[k]!r}" for k in ours if k != "name" and ours[k] != theirs[k])
        result.add("identity.contract", certified, f"{asked.fingerprint()} is asked for ({first})", REFUSED)
        return None
    result.add("identity.contract", certified, contract.fingerprint())
    ours_now = backend.identity(contract)
    same = ours_now.backend == identity["backend"]
    result.add("identity.backend", identity["backend"], ours_now.backend, ACCEPTED if same else APART)
    build = ours_now.build == identity["build"]
    result.add("identity.build", identity["build"], ours_now.build, ACCEPTED if build else OTHER)
    if not same:
        result.notes.append(
            "another backend class: weights on disk, ids of prompts and every equality within this machine are "
            "compared; drawn ids, digests of log-probs and logits, and weights after updates need not be the same: "
            "where they differ, they are not comparable"
        )
    elif not build:
        result.notes.append("another build of the same backend class: all bits are compared, since they must agree")
    return contract


def _short(record: Mapping[str, Any]) -> ShortRun:
    section = record["run"]
    return ShortRun(section["recipe"], tuple(prompt["messages"] for prompt in section["prompts"]))


def _recipe(record: Mapping[str, Any], result: Checked) -> None:
    """The run's recipe must be one, of the certificate's contract and steps."""
    with tempfile.TemporaryDirectory(prefix="zerogap-certificate-") as folder:
        try:
            config = _short(record).config("model", Path(folder))
        except ConfigError as error:
            result.add(f"run.recipe.{error.key}", repr(error.value), error.mend, REFUSED)
            return
    result.add("run.recipe.numerics", record["identity"]["contract"], config.contract().fingerprint())
    result.add("run.recipe.optimizer.max_steps", len(record["run"]["steps"]), config.optimizer.max_steps)


def _model(record: Mapping[str, Any], opened: Opened, result: Checked) -> None:
    """Spec, key by key, and tokenizer."""
    theirs, ours = record["model"], model_facts(opened)
    result.add(
        "model.source", theirs["source"], ours["source"], ACCEPTED if theirs["source"] == ours["source"] else OTHER
    )
    result.add("model.kind", theirs["kind"], ours["kind"], ACCEPTED if theirs["kind"] == ours["kind"] else OTHER)
    different = [
        key for key in sorted({*theirs["spec"], *ours["spec"]}) if theirs["spec"].get(key) != ours["spec"].get(key)
    ]
    for key in different:
        result.add(f"model.spec.{key}", theirs["spec"].get(key), ours["spec"].get(key), REFUSED)
    if not different:
        result.add("model.spec", f"{len(theirs['spec'])} keys", f"{len(ours['spec'])} keys")
    result.add("model.parameters", theirs["parameters"], ours["parameters"])
    result.add("model.tokenizer", theirs["tokenizer"][:16], ours["tokenizer"][:16])
    for name, a, b in _differences(theirs["tensors"], ours["tensors"]):
        result.add(f"model.tensors.{name}", a, b, REFUSED)
    if theirs["tensors"] == ours["tensors"]:
        result.add("model.tensors", f"{len(theirs['tensors'])} digests", f"{len(ours['tensors'])} digests")


def _weights(record: Mapping[str, Any], opened: Opened, result: Checked) -> None:
    """The digest of every tensor on disk."""
    certified = {k: d for k, d in record["weights"][0]["changed"].items() if k != KV_SCALES}
    ours = opened.decoder.digests()
    for name, theirs, here in _differences(certified, ours):
        result.add(f"weights.{name}", theirs, here, REFUSED)
    if certified == ours:
        result.add("weights", f"{len(certified)} digests", f"{len(ours)} digests")


def _differences(certified: Mapping[str, str], ours: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """(name, certified, here) of the digests that differ."""
    names = sorted({*certified, *ours})
    pairs = ((name, certified.get(name, "no such tensor"), ours.get(name, "no such tensor")) for name in names)
    return [(name, a, b) for name, a, b in pairs if a != b]


def _sequences(record: Mapping[str, Any], opened: Opened, result: Checked) -> None:
    """Ids that this model can compute."""
    limit, room = opened.files.spec.vocab_size, opened.decoder.max_positions
    for index, text in enumerate(record["sequences"]):
        ids = as_ids(text)
        if max(ids) >= limit or len(ids) > room:
            result.add(f"sequences[{index}]", f"{len(ids)} ids up to {max(ids)}", f"{room} ids below {limit}", REFUSED)
    if not record["sequences"]:
        result.add("sequences", "none", "at least one is needed", REFUSED)


# ---------------------------------------------------------------------------------------------------- what is computed


class _Draw:
    """What of each part is run. Drawn by the seed alone."""

    def __init__(self, sample: float, seed: int) -> None:
        self.sample, self._source = sample, random.Random(f"certificate/{seed}")

    def count(self, total: int) -> int:
        return min(total, max(1, round(self.sample * total)))

    def of(self, values: Sequence[int]) -> list[int]:
        """Some of the values, in their order; all where all are run."""
        keys = [self._source.random() for _ in values]
        chosen = sorted(range(len(values)), key=lambda i: keys[i])[: self.count(len(values))]
        return [values[i] for i in sorted(chosen)]


@dataclasses.dataclass(frozen=True)
class _Here:
    """A certificate being run here."""

    record: Mapping[str, Any]
    result: Checked
    draw: _Draw
    watch: Clock
    backend: str

    @property
    def same_class(self) -> bool:
        """True if digests of what was computed must come out the same."""
        return self.backend == self.record["identity"]["backend"]

    def digest(self, field: str, certified: object, here: object) -> None:
        """A digest, or ids, of what was computed: comparable within a backend class."""
        self.result.add(field, certified, here, None if self.same_class else APART)

    def counts(
        self, field: str, certified: int, compared: int, differing: int, first: str = "", part: bool = False
    ) -> None:
        """An equality check: nothing may differ here, and in a whole check as much as certified is compared."""
        self.result.compared += compared
        found = f"{compared:,} compared, {differing:,} differ{f': {first}' if first else ''}"
        same = compared == certified or part or not self.same_class
        verdict = ACCEPTED if compared and not differing and same else REFUSED
        self.result.add(field, f"{'part of ' if part else ''}{certified:,} compared, 0 differ", found, verdict)


def _subject(record: Mapping[str, Any], opened: Opened) -> Subject:
    """What ladder and neighbours climb on: the certificate's own sequences."""
    sequences = [as_ids(text) for text in record["sequences"]]
    return dataclasses.replace(subject_for(opened.decoder), sequences=sequences)


def _neighbours(here: _Here, subject: Subject) -> None:
    """Trials of the certificate's seed, and the victims that take part in them."""
    record = here.record["neighbours"]
    chosen = here.draw.of(range(record["trials"]))
    found = search_neighbours(subject, here.record["seed"], record["trials"], here.watch, chosen)
    here.result.add("neighbours.drawn", record["drawn"][:16], found["drawn"][:16])
    if len(record["victims"]) != len(found["victims"]):
        here.result.add("neighbours.victims", len(record["victims"]), len(found["victims"]))
    for index, (theirs, ours) in enumerate(zip(record["victims"], found["victims"], strict=False)):
        for name in ours:
            if theirs[name] != ours[name]:
                verdict = None if name == "prompt" or here.same_class else APART
                here.result.add(f"neighbours.victims[{index}].{name}", theirs[name], ours[name], verdict)
    computed = sum("logits" in victim for victim in found["victims"])
    if not any(line.field.startswith("neighbours.victims") for line in here.result.lines):
        here.result.add("neighbours.victims", f"digests of {computed}", f"digests of {computed}")
    counts = found["compared"], found["differing"], found["first"]
    if len(chosen) == record["trials"]:
        here.counts("neighbours", record["compared"], *counts)
    else:
        here.counts(f"neighbours, {len(chosen)} of {record['trials']} trials", record["compared"], *counts, part=True)


def _ladder(here: _Here, subject: Subject) -> None:
    """Checks of the ladder."""
    certified = {entry["number"]: entry for entry in here.record["ladder"]}
    numbers = here.draw.of(tuple(LADDER))
    for done in climb_ladder(subject, numbers, here.watch):
        entry = certified[done.number]
        here.counts(f"ladder.{done.number}", entry["compared"], done.compared, done.differing, done.first)
    if skipped := [number for number in LADDER if number not in numbers]:
        here.result.add("ladder", ", ".join(map(str, skipped)), "not drawn", LEFT)


def _run(here: _Here, source: str) -> None:
    """The RL run, its weights and its audit."""
    record, result = here.record, here.result
    section, total = record["run"], len(record["run"]["steps"])
    short = _short(record)
    steps = here.draw.count(total)
    with tempfile.TemporaryDirectory(prefix="zerogap-certificate-") as name:
        folder = Path(name)
        with here.watch.part("run"):
            run, weights = run_short(
                short, source, folder, steps=steps, progress=lambda text: here.watch.progress("run", text)
            )
        audited = audit(folder, None if steps == total else [steps], here.watch)
    for index, (theirs, ours) in enumerate(zip(section["prompts"], run["prompts"], strict=True)):
        if theirs["ids"] != ours["ids"]:
            result.add(f"run.prompts[{index}].ids", theirs["ids"], ours["ids"], REFUSED)
    for theirs, ours in zip(section["steps"], run["steps"], strict=False):
        _step(here, theirs, ours)
    for theirs, ours in zip(record["weights"], weights, strict=False):
        _version(here, theirs, ours)
    _audit(here, audited)
    if steps < total:
        result.add("run", f"steps {steps + 1} to {total}", "not drawn", LEFT)


def _step(here: _Here, certified: Record, ours: Record) -> None:
    """One step: what was drawn, and that trainer and rollout agree."""
    name = f"run.step {certified['step']}"
    pairs = list(zip(certified["samples"], ours["samples"], strict=False))
    if len(certified["samples"]) != len(ours["samples"]):
        here.result.add(f"{name}.samples", len(certified["samples"]), len(ours["samples"]))
    different = [(i, key) for i, (a, b) in enumerate(pairs) for key in b if a[key] != b[key]]
    for index, key in different:
        a, b = pairs[index]
        here.digest(f"{name}.samples[{index}].{key}", a[key] or "none", b[key] or "none")
    if not different:
        here.result.add(f"{name}.samples", f"log-probs of {len(pairs)}", f"log-probs of {len(pairs)}")
    here.counts(name, certified["compared"], ours["compared"], ours["mismatched"])


def _version(here: _Here, certified: Record, ours: Record) -> None:
    """Weights at one version: digests of the tensors that the update changed."""
    field = f"weights.version {ours['version']}"
    if certified["version"] != ours["version"]:
        here.result.add(f"{field}.version", certified["version"], ours["version"])
    different = _differences(certified["changed"], ours["changed"])
    for name, a, b in different:
        here.digest(f"{field}.{name}", a, b)
    if not different:
        count = len(ours["changed"])
        here.result.add(field, f"{count} new digests", f"{count} new digests")


def _audit(here: _Here, audited: AuditResult) -> None:
    """The audit of the run that was made here."""
    certified = {entry["step"]: entry for entry in here.record["audit"]}
    for entry in audit_entries(audited):
        differing = sum(entry[path] for path in ("trainer", "engine", "redrawn", "experts"))
        name = f"audit.step {entry['step']}"
        here.counts(name, certified[entry["step"]]["tokens"], entry["tokens"], differing)
    for step, why in audited.not_covered:
        here.result.add(f"audit.step {step}", "audited", why, REFUSED)
    for weights in audited.weights:
        if weights.changed or weights.damaged:
            what = weights.damaged or f"changed: {', '.join(weights.changed)}"
            here.result.add(f"audit.weights of version {weights.version}", "whole", what, REFUSED)
