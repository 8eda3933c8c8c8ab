"""Where a run begins: at its newest checkpoint, at a named one, or at step 1; and that it is the same run.

What decides the course of a run (model, data, rewards, sampling, loss, optimizer, seed) must be what the checkpoint was
made with. What changes no bit (memory, speed, logging), how long the run is, and where it lies may differ.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zerogap.config import RunConfig, contract_of
from zerogap.errors import CheckpointError, ConfigError
from zerogap.rl.run_folder import RunFolder
from zerogap.train.checkpoint import list_checkpoints

FREE = (
    *("reward.timeout", "reward.on_error"),
    *("output_dir", "logging.", "checkpoint.", "eval.", "parity.", "algorithm.name"),
    *("rollout.page_size", "rollout.kv_cache_memory", "rollout.max_batch_tokens", "rollout.max_sequences"),
    *("rollout.prefix_cache", "rollout.speculation.", "moe.record_routing"),
    *("optimizer.micro_batch_tokens", "optimizer.activation_recompute"),
)


def starting_point(folder: RunFolder, config: RunConfig, resume: str, *, finished: bool = False) -> Path | None:
    """The checkpoint to resume from, or None to begin at step 1.

    Args:
        finished: the last checkpoint of a finished run may be named too, to look at the run as it ended.

    Raises:
        ConfigError: the run in `output_dir` is finished, nothing is left to do after the named checkpoint, or its run
            lies elsewhere and `output_dir` holds another.
        CheckpointError: the named checkpoint is not there.
    """
    if resume == "never":
        return None
    if resume != "auto":
        path = Path(resume).expanduser()
        if not (path / "state.json").is_file():
            raise CheckpointError(f"{path}: not a checkpoint (no state.json); they lie in RUN/checkpoints")
        _require_place(folder, path)
        if not finished:
            _require_work(folder, config, path)
        return path
    found = list_checkpoints(folder.checkpoints) if folder.checkpoints.is_dir() else []
    step = int(found[-1].name.rpartition("-")[2]) if found else 0
    if folder.model.is_dir() and (not found or step >= config.optimizer.max_steps):
        more = "raise optimizer.max_steps, " if found else ""
        mend = f"the run there is finished: {more}take another folder, or replace it with --resume never"
        raise ConfigError("output_dir", str(folder.path), mend)
    return found[-1] if found else None


def _require_place(folder: RunFolder, checkpoint: Path) -> None:
    """Raise `ConfigError` where a run from the named checkpoint would replace another run."""
    here = checkpoint.resolve().parent == folder.checkpoints.resolve()
    if not here and (folder.model.is_dir() or list_checkpoints(folder.checkpoints)):
        mend = f"it holds a run, and {checkpoint} is of another: take another folder, or go on with --resume auto"
        raise ConfigError("output_dir", str(folder.path), mend)


def _require_work(folder: RunFolder, config: RunConfig, checkpoint: Path) -> None:
    """Raise `ConfigError` where a run from the named checkpoint would do nothing."""
    here = checkpoint.resolve().parent == folder.checkpoints.resolve()
    number = checkpoint.resolve().name.rpartition("-")[2]
    steps = config.optimizer.max_steps
    if number.isdigit() and int(number) >= steps and (folder.model.is_dir() or not here):
        mend = f"{checkpoint} has done {number} steps, so nothing is left to do: raise it"
        raise ConfigError("optimizer.max_steps", steps, mend)


def require_same_run(config: RunConfig, before: Mapping[str, Any], checkpoint: Path) -> None:
    """Raise `ConfigError` for the first setting that decides the run's course and was another at the checkpoint."""
    now, then = dict(_leaves(config.model_dump(mode="json"))), dict(_leaves(before))
    same_contracts = _fingerprints(config.model_dump(mode="json")) == _fingerprints(before)
    for key in sorted({*now, *then}):
        if key.startswith(FREE) or now.get(key) == then.get(key):
            continue
        if same_contracts and key.removeprefix("rollout.").partition(".")[0] == "numerics":
            continue  # the same contract in other words
        if key == "optimizer.max_steps" and config.optimizer.lr_scheduler_type == "constant":
            continue
        mend = f"{checkpoint} was made with {then.get(key)!r}: use that, or begin another run in another output_dir"
        raise ConfigError(key, now.get(key), mend)


def require_same_prompts(digest: str, before: str | None, checkpoint: Path) -> None:
    """Raise `ConfigError` if prompts or answers are others than at the checkpoint, though their paths are the same.

    Args:
        digest: of the prompts now (`setup.prompts_digest`).
        before: of those at the checkpoint; None: it does not say.
    """
    if before is not None and digest != before:
        mend = f"the rows are others than when {checkpoint} was made: bring those back, or begin another run"
        raise ConfigError("data.train", f"prompts {digest[:16]}", mend)


def _fingerprints(tree: Mapping[str, Any]) -> tuple[str, str]:
    """Of the contracts of training and rollout that a recipe's tree asks for."""
    trained = tree.get("numerics", "bf16")
    sampled = tree.get("rollout", {}).get("numerics")
    return contract_of(trained).fingerprint(), contract_of(trained if sampled is None else sampled).fingerprint()


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
