"""The folder of a run: where everything lies, and how it is written so that a crash loses nothing that was there.

    config.yaml          the complete recipe
    metrics.jsonl        one line per step           eval.jsonl         one line per held-out evaluation
    completions.jsonl    some completions per step   errors.jsonl       what ended a step, if anything did
    rollouts/            all samples of every step   weights/           published weights of the audited steps
    checkpoints/         to resume from              model/             the trained model, a Hugging Face folder
    evaluations/         every completion of each held-out evaluation, a line each
    report.html          curves and completions      tensorboard/       event files, if wanted

Lines are appended and flushed at once; every other file is written beside its place and renamed. A run that resumes
after step N first cuts all of them back to step N.
"""

import contextlib
import json
import math
import numbers
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from zerogap.config import RunConfig, load_config
from zerogap.errors import CheckpointError, ConfigError, OutputError
from zerogap.models.decoder import Decoder
from zerogap.numerics import Numerics
from zerogap.rl.report import read_lines
from zerogap.rl.rollout_log import logged_steps, rollout_path, write_json
from zerogap.train.checkpoint import clear_partial, list_checkpoints
from zerogap.weights import ModelFiles, save_folder
from zerogap.weights.whole_folder import WRITE_ERRORS, remove_folder

OUTPUT = "rewards.log"  # what reward functions printed
LINES = ("metrics", "eval", "completions", "errors")
PARTS = (
    *("checkpoints", *(f"{n}.jsonl" for n in LINES), OUTPUT),
    *("rollouts", "weights", "evaluations", "model", "report.html", "tensorboard"),
)
CONFIG = "config.yaml"  # what makes a folder one of a run: written first, removed last
FACTS = "zerogap.json"  # as `weights.save_folder` names it
VERSION = "version-"


class RunFolder:
    """Paths and writers of one run. Attributes are paths."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self.rollouts = self.path / "rollouts"
        self.weights = self.path / "weights"
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model"
        self.evaluations = self.path / "evaluations"
        self.report = self.path / "report.html"
        self.tensorboard = self.path / "tensorboard"
        self.config_file = self.path / CONFIG

    # ---- the run as a whole

    @property
    def exists(self) -> bool:
        """True if a run was begun here."""
        return self.config_file.is_file()

    def config(self) -> RunConfig:
        """The recipe of the run that lies here.

        Raises:
            CheckpointError: no run lies here.
        """
        if not self.exists:
            raise CheckpointError(f"{self.path} holds no config.yaml, so it is not the folder of a run")
        return load_config(self.config_file)

    def require_ours(self) -> None:
        """Raise `ConfigError` if a run here could not write, or would replace something that no run has written."""
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError("output_dir", str(self.path), "it is a file; name a folder")
        nearest = next(p for p in (self.path.absolute(), *self.path.absolute().parents) if p.exists())
        if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
            why = "is no folder" if not nearest.is_dir() else "may not be written to"
            raise ConfigError("output_dir", str(self.path), f"{nearest} {why}: name a folder that can be made")
        found = [name for name in PARTS if (self.path / name).exists()]
        if found and not self.exists:
            mend = f"it holds no {CONFIG} of a run, but {', '.join(found)}, which a run would replace: name another one"
            raise ConfigError("output_dir", str(self.path), mend)

    def begin(self, config: RunConfig, step: int) -> None:
        """Make the folder ready for `step + 1`: everything that was written after `step` goes.

        Checkpoints go first, the newest before others: killed at any moment in between, the run that is left resumes
        from one that has all of its lines.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        later = list_checkpoints(self.checkpoints) if self.checkpoints.is_dir() else []
        for path in reversed(later):
            if int(path.name.rpartition("-")[2]) > step:
                remove_folder(path)
        clear_partial(self.checkpoints)
        if step == 0:
            for name in (*PARTS, CONFIG):
                self._remove(self.path / name)
        for name in LINES:
            self._cut_lines(self.path / f"{name}.jsonl", step)
        for logged in logged_steps(self.rollouts):
            if logged > step:
                rollout_path(self.rollouts, logged).unlink()
                rollout_path(self.rollouts, logged).with_suffix(".safetensors").unlink(missing_ok=True)
        for path in self.evaluations.glob("step-*.jsonl"):
            if int(path.stem.rpartition("-")[2]) > step:
                path.unlink()
        begun = (*self.path.glob(".*.partial*"), *self.rollouts.glob(".*.partial"), *self.weights.glob(".version-*"))
        for left in (self.model, *self.path.glob(".model.*"), *begun):  # and what a killed process had begun to write
            self._remove(left)
        partial = self.path / ".config.yaml.partial"
        partial.write_text(config.to_yaml(), encoding="utf-8")
        partial.replace(self.config_file)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """While files are written: one that cannot be raises `OutputError`, which says where the run can go on."""
        try:
            yield
        except WRITE_ERRORS as error:
            found = list_checkpoints(self.checkpoints)
            whole = f"{found[-1]} is whole, the run resumes from it" if found else "there is no checkpoint yet"
            raise OutputError(f"{self.path}: a file could not be written ({error}); {whole}") from error

    @staticmethod
    def _remove(path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    @staticmethod
    def _cut_lines(path: Path, step: int) -> None:
        if not path.is_file():
            return
        kept = [record for record in read_lines(path) if record.get("step", 0) <= step]
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text("".join(_line(record) for record in kept), encoding="utf-8")
        partial.replace(path)

    def append(self, name: str, record: Mapping[str, Any]) -> None:
        """Add a line to `NAME.jsonl`; it is out of this process when the call returns."""
        with (self.path / f"{name}.jsonl").open("a", encoding="utf-8") as file:
            file.write(_line(record))

    def log_output(self, step: int, text: str) -> None:
        """Add what reward functions printed in a step to `rewards.log`, if it is anything."""
        if text.strip():
            with (self.path / OUTPUT).open("a", encoding="utf-8") as file:
                file.write(f"=== step {step}\n{text.rstrip()}\n")

    def write_evaluation(self, step: int, table: Iterable[Mapping[str, Any]]) -> None:
        """Write `evaluations/step-N.jsonl`, a line per completion, whole or not at all."""
        write_table(self.evaluations / f"step-{step}.jsonl", ({"step": step, **row} for row in table))

    # ---- weights of audited steps

    def save_version(self, decoder: Decoder, files: ModelFiles, source: str | None, rollout: Numerics) -> Path:
        """Save the decoder's published weights as `weights/version-N`, with the digest of every tensor.

        Args:
            rollout: the contract that samples are drawn under.
            source: name of a model that cannot change (hub id, quick start) and has exactly these weights: then only
                digests are stored. None: the weights are.
        """
        target = self.weights / f"{VERSION}{decoder.version}"
        facts = {**weight_facts(decoder, rollout), "source": source}
        if source is None:
            tensors = ((name, handle.stored()) for name, handle in decoder.weights.items())
            save_folder(target, decoder.spec, tensors, files=files, numerics_meta=facts)
        else:
            target.mkdir(parents=True, exist_ok=True)
            write_json(target / FACTS, facts)
        return target

    def saved_versions(self) -> dict[int, Path]:
        """Folders of saved weights by version."""
        found = {p.name.removeprefix(VERSION): p for p in self.weights.glob(f"{VERSION}*") if (p / FACTS).is_file()}
        return {int(name): found[name] for name in sorted(found, key=lambda n: (len(n), n)) if name.isdigit()}


def side_facts(trained: Numerics, rollout: Numerics) -> dict[str, Any]:
    """Whether both sides of a run compute the same bits, and the rollout's contract."""
    return {"one_sided": trained.fingerprint() != rollout.fingerprint(), "rollout_numerics": rollout.fields()}


def weight_facts(decoder: Decoder, rollout: Numerics) -> dict[str, Any]:
    """What goes with saved weights: contracts of both sides, identity, version, the list of quantised tensors, digests
    by tensor name, KV scale set."""
    return {
        "format": 1,
        "version": decoder.version,
        **side_facts(decoder.numerics, rollout),
        "numerics": decoder.numerics.fields(),
        "identity": str(decoder.identity),
        "quantised": list(decoder.quantised()),
        "digests": decoder.digests(),
        "kv_scales": None if decoder.kv_scales is None else decoder.kv_scales.to_list(),
    }


def write_table(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write a JSONL file whole or not at all; its folder is made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text("".join(map(_line, records)), encoding="utf-8")
    partial.replace(path)


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(_finite(record), ensure_ascii=False, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, Mapping):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else None
    return str(value)
