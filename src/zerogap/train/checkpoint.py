"""Checkpoints of a training run: written beside the old one, whole or not at all.

A checkpoint is a folder with `trainer.safetensors` (FP32 masters and moments) and `state.json` (contract, versions,
the list of quantised tensors, digests of all published weights, and whatever the loop adds: data position, schedule).
Frozen weights are not copied; their digests are, so that a checkpoint over another base model is refused. `latest` is
the highest whole step.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from zerogap.errors import CheckpointError
from zerogap.models.inventory import require_same_list
from zerogap.numerics import Numerics, require_equal
from zerogap.ops.kv_scales import KVScales
from zerogap.train.trainer import Trainer
from zerogap.weights.whole_folder import replace_folder

FORMAT = 1
PREFIX = "checkpoint-"


def save_checkpoint(root: Path, step: int, trainer: Trainer, extra: Mapping[str, Any], keep: int = 2) -> Path:
    """Write `root/checkpoint-STEP`, then delete all but the `keep` newest whole checkpoints.

    Args:
        extra: JSON-ready facts of the caller; come back from `load_checkpoint`.
    """
    target = root / f"{PREFIX}{step}"
    partial = root / f".{target.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    state = trainer.state()
    save_file({n: t.contiguous() for n, t in state.pop("tensors").items()}, partial / "trainer.safetensors")
    facts = {"format": FORMAT, "step": step, **state, "quantised": list(trainer.decoder.quantised())}
    facts |= {"digests": trainer.decoder.digests(), "extra": dict(extra)}
    (partial / "state.json").write_text(json.dumps(facts, indent=1))
    replace_folder(partial, target)
    for path in list_checkpoints(root)[:-keep]:
        shutil.rmtree(path)
    return target


def list_checkpoints(root: Path) -> list[Path]:
    """Whole checkpoints under `root`, by ascending step."""
    found = [p for p in root.glob(f"{PREFIX}*") if (p / "state.json").exists() and p.name[len(PREFIX) :].isdigit()]
    return sorted(found, key=lambda p: int(p.name[len(PREFIX) :]))


def load_checkpoint(path: Path, trainer: Trainer) -> dict[str, Any]:
    """Put a checkpoint's masters, moments and versions into `trainer`; returns the facts in `state.json`.

    Raises:
        CheckpointError: incomplete or corrupt files, other trainable tensors, or another base model.
        ContractError: another numerics contract, or another list of quantised tensors.
    """
    try:
        facts = json.loads((path / "state.json").read_text())
        tensors = load_file(path / "trainer.safetensors")
    except (OSError, json.JSONDecodeError, SafetensorError) as error:
        raise CheckpointError(f"{path}: not a whole checkpoint ({error})") from error
    if facts.get("format") != FORMAT:
        raise CheckpointError(f"{path}: format {facts.get('format')!r}, this build reads {FORMAT}")
    require_equal(trainer.decoder.numerics, Numerics.from_fields(facts["numerics"]), str(path))
    require_same_list(trainer.decoder.quantised(), facts.get("quantised"), str(path))
    if facts["trainable"] != trainer.trainable:
        raise CheckpointError(f"{path}: trains {len(facts['trainable'])} tensors, this run {len(trainer.trainable)}")
    if set(tensors) != set(trainer.optimizer.state()):
        raise CheckpointError(f"{path}: tensors differ from those of this run's optimizer")
    scales = facts.get("kv_scales")
    kv_scales = None if scales is None else KVScales.from_list(scales)
    trainer.load_state(tensors, facts["updates"], facts["version"], kv_scales)
    ours = trainer.decoder.digests()
    for name, digest in facts["digests"].items():
        if ours.get(name) != digest:
            raise CheckpointError(f"{path}: {name} has digest {ours.get(name)}, the checkpoint says {digest}")
    return facts
