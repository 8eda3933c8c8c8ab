"""Making a certificate: a model is held against itself in every way at hand, and what was compared becomes a record.

Three parts: the adversarial search for neighbours and the parity ladder on the model as it is on disk, then a short RL
run of the public loop whose weights and log-probs are audited under other conditions. A record says what was computed
(ids, digests, seeds) and how many numbers were compared; `objections` says what in it speaks against the model.
"""

import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from zerogap.config import RunConfig
from zerogap.errors import ConfigError, ZerogapError
from zerogap.models.decoder import Decoder
from zerogap.numerics import Numerics
from zerogap.ops.cpu import library
from zerogap.ops.digest import digest
from zerogap.text import Tokenizer
from zerogap.types import BlockCodes
from zerogap.verify import neighbours
from zerogap.verify.audit import AuditResult, audit_run
from zerogap.verify.certificate import FORMAT, VERSION, Record, as_ids, as_text, canonical
from zerogap.verify.checks import NamedTensor, Subject, Tally
from zerogap.verify.faults import Fault, planted
from zerogap.verify.ladder import LADDER, CheckResult, climb, subject_for
from zerogap.verify.paths import Ids
from zerogap.verify.short_run import POSITIONS, ShortRun, plan, run_short
from zerogap.weights import ModelFiles, open_model

Progress = Callable[[str, str], None]  # which part (`PARTS`), how far it has come
MOST_TRIALS = 10_000
PARTS = ("model", "neighbours", "ladder", "run", "audit")
LIBRARIES = (torch, np, transformers)
CPU_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_bf16", "avx512_fp16", "amx_bf16", "sve")


@dataclasses.dataclass(frozen=True, eq=False)
class Opened:
    """A model, opened and loaded under a contract: the decoder that neighbours and ladder work on.

    Attributes:
        tensors: digest of every tensor's values on disk, by name: a contract that quantises computes with less of them.
    """

    source: str
    files: ModelFiles
    decoder: Decoder
    tokenizer: Tokenizer
    tensors: Mapping[str, str]


class Clock:
    """Seconds of each part, and who is told of the progress. Mutated as parts end."""

    def __init__(self, progress: Progress) -> None:
        self.progress, self.seconds = progress, {}  # type: ignore[var-annotated]

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self.progress(name, "")
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = round(time.perf_counter() - began, 1)


def open_loaded(source: str, numerics: Numerics) -> Opened:
    """Open and load a model.

    Raises:
        ConfigError: it has no tokenizer or no chat template, without which no RL run is possible.
    """
    files = open_model(source)
    tokenizer = tokenizer_of(source, files)
    tensors: dict[str, str] = {}
    decoder = Decoder(files.spec, numerics, max_positions=POSITIONS).load(_digested(files.tensors(), tensors))
    return Opened(source, files, decoder, tokenizer, tensors)


def _digested(tensors: Iterable[NamedTensor], found: dict[str, str]) -> Iterator[NamedTensor]:
    """The same tensors; digests of their values are noted on the way. FP32 holds those of every dtype exactly, so that
    files which store equal values in different dtypes have equal digests."""
    for name, tensor in tensors:
        if isinstance(tensor, BlockCodes):
            found[name] = digest(tensor.codes, tensor.scales)
        else:
            found[name] = digest(tensor.to(torch.float32))
        yield name, tensor


def tokenizer_of(source: str, files: ModelFiles) -> Tokenizer:
    """The model's tokenizer, which must have a chat template."""
    names = files.tokenizer_files()
    if not names or files.chat_template is None:
        what = "chat template" if names else "tokenizer"
        raise ConfigError("model", source, f"it has no {what}, and a certificate contains an RL run, which needs one")
    return Tokenizer.from_files(names, files.chat_template)


def certify(
    source: str,
    numerics: Numerics,
    *,
    recipe: RunConfig | None = None,
    texts: Sequence[str] = (),
    seed: int = 0,
    fault: Fault | None = None,
    trials: int = neighbours.TRIALS,
    progress: Progress = lambda part, text: None,
) -> Record:
    """Hold a model against itself, in minutes for a small one.

    Args:
        source: a folder, hub id or .gguf file, or the quick-start model.
        recipe: whose settings the RL run takes over.
        texts: real text that some of the sequences are of.
        seed: of random sequences and of the neighbours.
        fault: planted in every decoder, to see it found.
        trials: of the search for neighbours.

    Returns:
        The record, not sealed yet. `objections` says whether it may be called exact.
    """
    began = time.perf_counter()
    watch = Clock(progress)
    with watch.part("model"):
        opened = open_loaded(source, numerics)
        short = plan(source, numerics, opened.files.spec, opened.tokenizer, recipe)
        subject = subject_for(opened.decoder, [opened.tokenizer.encode(text).tolist() for text in texts], seed)
        record = _identity_of(opened, seed) | {"sequences": [as_text(ids) for ids in subject.sequences]}
    with planted(fault, subject) if fault is not None else nullcontext(subject) as faulty:
        record["neighbours"] = search_neighbours(faulty, seed, trials, watch)
        record["ladder"] = [_check_entry(r) for r in climb_ladder(faulty, tuple(LADDER), watch)]
    del opened, subject, faulty  # a large model is held once
    record |= _run_and_audit(short, source, fault, watch)
    at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return record | {"made": {"at": at, "seconds": watch.seconds | {"all": round(time.perf_counter() - began, 1)}}}


def _run_and_audit(short: ShortRun, source: str, fault: Fault | None, watch: Clock) -> Record:
    """The record's sections `run`, `weights`, `audit` and `layouts`. Where run or audit ended with an error, they are
    empty, and `failed` says why: such a record cannot be written."""
    with tempfile.TemporaryDirectory(prefix="zerogap-certificate-") as folder:
        try:
            with watch.part("run"):
                run, weights = run_short(
                    short, source, Path(folder), fault=fault, progress=lambda text: watch.progress("run", text)
                )
            audited = audit(Path(folder), None, watch)
        except ZerogapError as error:
            empty = {"run": {"recipe": dict(short.recipe), "prompts": [], "steps": []}, "weights": [], "audit": []}
            return empty | {"layouts": {}, "failed": f"{type(error).__name__}: {error}"}
    layouts = {
        "run": f"page size {short.recipe['rollout']['page_size']}, {library.num_threads()} threads",
        "audit": "; ".join(audited.notes),
        "neighbours": f"page sizes {neighbours.PAGES}, chunks {neighbours.CHUNKS}, lengths {neighbours.LENGTHS}",
    }
    return {"run": run, "weights": weights, "audit": audit_entries(audited), "layouts": layouts}


# ---------------------------------------------------------------------------------------------------- parts


def search_neighbours(
    subject: Subject, seed: int, count: int, watch: Clock, chosen: Sequence[int] | None = None
) -> Record:
    """The record's section `neighbours`.

    Args:
        count: trials that the seed draws.
        chosen: which of them are tried, and only their victims; None: all.
    """
    decoder = subject.decoder
    with watch.part("neighbours"):
        if decoder.needs_calibration:
            decoder.calibrate(subject.sequences)
        prompts = neighbours.victim_prompts(subject.sequences)
        drawn = neighbours.draw_trials(decoder, prompts, seed, count)
        tried = drawn if chosen is None else [drawn[i] for i in chosen]
        wanted = {v for trial in tried for v in trial.victims}
        victims = {
            i: neighbours.alone(decoder, ids, i) for i, ids in enumerate(prompts) if chosen is None or i in wanted
        }
        tally = Tally()
        every = [victims.get(i) for i in range(len(prompts))]
        neighbours.search(
            decoder,
            every,  # type: ignore[arg-type]
            tried,
            tally,
            lambda done: watch.progress("neighbours", f"trial {done} of {len(tried)}"),
        )
    return {
        "trials": len(drawn),
        "drawn": neighbours.trials_digest(drawn),
        "victims": [_victim_entry(ids, victims.get(i)) for i, ids in enumerate(prompts)],
        **dataclasses.asdict(tally),
    }


def _victim_entry(prompt: Ids, victim: neighbours.Victim | None) -> Record:
    """A victim in a record; only its prompt where it was not computed."""
    if victim is None:
        return {"prompt": as_text(prompt)}
    logprobs, logits = victim.digests()
    drawn = as_text(victim.sample.completion_ids)
    return {"prompt": as_text(prompt), "drawn": drawn, "logprobs": logprobs, "logits": logits}


def climb_ladder(subject: Subject, numbers: Sequence[int], watch: Clock) -> list[CheckResult]:
    """The chosen checks of the ladder."""
    results = []
    with watch.part("ladder"):
        steps = climb(subject, numbers)
        for place, number in enumerate(numbers, 1):
            watch.progress("ladder", f"check {number} ({place} of {len(numbers)}): {LADDER[number][0]}")
            results.append(next(steps))
    return results


def _check_entry(result: CheckResult) -> Record:
    return {name: getattr(result, name) for name in ("number", "name", "compared", "differing", "first")}


def audit(folder: Path, steps: Sequence[int] | None, watch: Clock) -> AuditResult:
    """The audit of the run in a folder."""
    with watch.part("audit"):
        found: list[object] = []

        def told(result: object) -> None:
            found.append(result)
            watch.progress("audit", f"{len(found)} results")

        return audit_run(folder / "run", steps, progress=told)


def audit_entries(result: AuditResult) -> list[Record]:
    """The record's section `audit`. Weights that differ or cannot be read leave their steps out of it."""
    sound = {w.version for w in result.weights if not (w.changed or w.damaged)}
    names = ("step", "version", "tokens", "trainer", "engine", "redrawn", "experts")
    return [{name: getattr(s, name) for name in names} for s in result.steps if s.version in sound]


# ---------------------------------------------------------------------------------------------------- facts


def _identity_of(opened: Opened, seed: int) -> Record:
    decoder = opened.decoder
    return {
        "format": FORMAT,
        "version": VERSION,
        "identity": dataclasses.asdict(decoder.identity),
        "contract": decoder.numerics.fields(),
        "model": model_facts(opened),
        "versions": versions(),
        "hardware": hardware(),
        "seed": seed,
    }


def model_facts(opened: Opened) -> Record:
    """The record's section `model`."""
    files = opened.files
    tokenizer = hashlib.sha256()
    parts = {**files.tokenizer_files(), "chat template": (files.chat_template or "").encode()}
    for name in sorted(parts):
        tokenizer.update(canonical([name, len(parts[name])]) + parts[name])
    spec = dataclasses.asdict(files.spec)
    size = sum(math.prod(weight.shape) for weight in files.spec.weight_specs(Numerics()).values())
    return {
        "source": opened.source,
        "kind": "GGUF file" if files.source.suffix == ".gguf" else "Hugging Face folder",
        "parameters": size,
        "spec": json.loads(canonical(spec)),
        "tokenizer": tokenizer.hexdigest(),
        "tensors": dict(opened.tensors),
    }


def versions() -> dict[str, str]:
    """The record's section `versions`."""
    libraries = {library.__name__: str(library.__version__) for library in LIBRARIES}
    try:
        ours = importlib.metadata.version("zerogap")
    except importlib.metadata.PackageNotFoundError:
        ours = "source tree"
    return {"zerogap": ours, "python": platform.python_version()} | libraries


def hardware() -> Record:
    """The record's section `hardware`: no name of a machine, only what the kernels can use of it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    words = {word for line in text.splitlines() if line.startswith(("flags", "Features")) for word in line.split()}
    return {
        "machine": platform.machine(),
        "cores": os.cpu_count() or 1,
        "flags": [flag for flag in CPU_FLAGS if flag in words],
    }


# ---------------------------------------------------------------------------------------------------- judging


def objections(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(field, what is wrong) of everything in a record that speaks against calling its model exact: differences, parts
    in which nothing was compared or changed, and parts that do not belong together."""
    found: list[tuple[str, str]] = []

    def equal(field: str, compared: int, differing: int, first: str = "") -> None:
        if differing:
            found.append((field, f"{differing:,} of {compared:,} differ{f': {first}' if first else ''}"))
        elif not compared:
            found.append((field, "nothing was compared"))

    part = record["neighbours"]
    if not neighbours.TRIALS <= part["trials"] <= MOST_TRIALS:
        found.append(("neighbours.trials", f"{part['trials']}, from {neighbours.TRIALS} to {MOST_TRIALS} are right"))
    equal("neighbours", part["compared"], part["differing"], part["first"])
    if [check["number"] for check in record["ladder"]] != list(LADDER):
        found.append(("ladder", f"the checks are not {', '.join(map(str, LADDER))}"))
    for check in record["ladder"]:
        equal(f"ladder.{check['number']}", check["compared"], check["differing"], check["first"])
    if "failed" in record:
        return [*found, ("run", record["failed"])]
    steps, audited = record["run"]["steps"], {entry["step"]: entry for entry in record["audit"]}
    if len(steps) < 3:
        found.append(("run.steps", f"{len(steps)} steps, at least 3 are needed"))
    if len(record["weights"]) != len(steps) + 1:
        found.append(("weights", f"{len(record['weights'])} versions for {len(steps)} steps"))
    for step, before, after in zip(steps, record["weights"], record["weights"][1:], strict=False):
        name = f"run.step {step['step']}"
        equal(name, step["compared"], step["mismatched"])
        drawn = sum(len(as_ids(sample["ids"])) for sample in step["samples"])
        if step["compared"] != drawn:
            found.append((name, f"{step['compared']} log-probs compared, {drawn} drawn"))
        if step["version"] != before["version"]:
            found.append((name, f"drawn at version {step['version']}, its weights are version {before['version']}"))
        if not after["changed"] or after["version"] <= before["version"]:
            found.append((f"weights.version {after['version']}", "the update changed nothing"))
        entry = audited.get(step["step"])
        if entry is None:
            found.append((f"audit.step {step['step']}", "not audited"))
        else:
            differing = sum(entry[path] for path in ("trainer", "engine", "redrawn", "experts"))
            equal(f"audit.step {step['step']}", entry["tokens"], differing)
    return found
