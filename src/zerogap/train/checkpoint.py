"""Checkpoints of a training run: written beside the old one, whole or not at all.

A checkpoint is a folder with `trainer.safetensors` (FP32 masters, moments, routers' correction biases) and `state.json`
(contract, versions, the list of quantised tensors, digests of all published weights, and whatever the loop adds: data
position, schedule). Frozen weights are not copied; their digests are, so that a checkpoint over another base model is
refused. `latest` is the highest whole step.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from zerogap.errors import CheckpointError
from zerogap.models.decoder import Decoder
from zerogap.models.inventory import require_same_list
from zerogap.numerics import Numerics, require_equal
from zerogap.ops.kv_scales import KVScales
from zerogap.train.trainer import Trainer
from zerogap.weights.whole_folder import remove_folder, replace_folder

FORMAT = 1
PREFIX = "checkpoint-"
_FACTS = {
    **dict.fromkeys(("step", "updates", "version"), int),
    **dict.fromkeys(("numerics", "digests", "extra"), dict),
    "trainable": list,
}  # of state.json, besides those that have checks of their own


def save_checkpoint(root: Path, step: int, trainer: Trainer, extra: Mapping[str, Any], keep: int = 2) -> Path:
    """Write `root/checkpoint-STEP`, then delete all but the `keep` newest whole checkpoints.

    Args:
        extra: JSON-ready facts of the caller; come back from `load_checkpoint`.

    Raises:
        OSError, SafetensorError: it cannot be written (the disk is full, say); earlier checkpoints are as they were.
    """
    target = root / f"{PREFIX}{step}"
    partial = root / f".{target.name}.partial"
    clear_partial(root)
    partial.mkdir(parents=True)
    try:
        state = trainer.state()
        save_file({n: t.contiguous() for n, t in state.pop("tensors").items()}, partial / "trainer.safetensors")
        facts = {"format": FORMAT, "step": step, **state, "quantised": list(trainer.decoder.quantised())}
        facts |= {"digests": trainer.decoder.digests(), "extra": dict(extra)}
        (partial / "state.json").write_text(json.dumps(facts, indent=1))
        replace_folder(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    for path in list_checkpoints(root)[:-keep]:
        remove_folder(path)
    return target


def clear_partial(root: Path) -> None:
    """Delete what a killed process had begun to write or to delete under `root`."""
    for left in root.glob(f".{PREFIX}*"):
        shutil.rmtree(left, ignore_errors=True)


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
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{path}: not a whole checkpoint ({error})") from error
    _check_facts(path, facts)
    require_equal(trainer.decoder.numerics, Numerics.from_fields(facts["numerics"]), str(path))
    require_same_list(trainer.decoder.quantised(), facts.get("quantised"), str(path))
    if facts["trainable"] != trainer.trainable:
        raise CheckpointError(f"{path}: trains {len(facts['trainable'])} tensors, this run {len(trainer.trainable)}")
    needed = {name: (tensor.dtype, tensor.shape) for name, tensor in trainer.state()["tensors"].items()}
    if {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()} != needed:
        raise CheckpointError(f"{path}: tensors differ from those of this run's optimizer and routers")
    kv_scales = _kv_scales(path, facts.get("kv_scales"), trainer.decoder)
    trainer.load_state(tensors, facts["updates"], facts["version"], kv_scales)
    ours, stored = trainer.decoder.digests(), facts["digests"]
    for name in sorted({*ours, *stored}):
        if ours.get(name) != stored.get(name):
            raise CheckpointError(f"{path}: {name} has digest {ours.get(name)}, the checkpoint says {stored.get(name)}")
    return facts


def _check_facts(path: Path, facts: object) -> None:
    """Raise `CheckpointError` unless `state.json` holds a mapping with every fact that `load_checkpoint` needs."""
    if not isinstance(facts, dict):
        raise CheckpointError(f"{path}: state.json holds a {type(facts).__name__}, not a mapping")
    if facts.get("format") != FORMAT:
        raise CheckpointError(f"{path}: format {facts.get('format')!r}, this build reads {FORMAT}")
    for name, kind in _FACTS.items():
        if type(facts.get(name)) is not kind:
            raise CheckpointError(f"{path}: state.json has {name} = {facts.get(name)!r:.40}, not a {kind.__name__}")


def _kv_scales(path: Path, stored: object, decoder: Decoder) -> KVScales | None:
    """The scale set of a checkpoint, if the contract has one.

    Raises:
        CheckpointError: it is missing, no table of numbers, or another model's; names the file.
    """
    if not decoder.calibrated:
        return None
    if not isinstance(stored, list):
        raise CheckpointError(f"{path}: the contract calibrates the KV cache's scales, and state.json holds none")
    try:
        scales = KVScales.from_list(stored)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    needed = (decoder.spec.num_layers, 2, decoder.spec.num_kv_heads)
    if scales.values.shape != needed:
        raise CheckpointError(f"{path}: KV scales are {tuple(scales.values.shape)}, this model needs {needed}")
    return scales
