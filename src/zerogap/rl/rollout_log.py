"""Rollouts on disk: everything that `zerogap audit` needs to compute a step's log-probs again, bit by bit.

A step is two files: `step-N.safetensors` holds the arrays of all samples laid one after the other (ids, FP32 log-probs,
weight versions, kept sets, recorded experts), `step-N.json` who drew them (identity), their parameters, keys, finish
reasons and rewards. Experts are written in one byte each where there are at most 128.
Both are written under another name first, the JSON last: a step with a JSON file is whole.
"""

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from zerogap.errors import CheckpointError
from zerogap.routing import RoutingTrace
from zerogap.types import Identity, Sample, SamplingKey, SamplingParams

FORMAT = 1


@dataclasses.dataclass(frozen=True, eq=False)
class LoggedRollout:
    """The samples of one step, in global-batch order, with their rewards (None: no reward) and advantages."""

    step: int
    samples: tuple[Sample, ...]
    rewards: tuple[float | None, ...]
    advantages: tuple[float, ...]


def write_json(path: Path, content: object) -> None:
    """Write a JSON file whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def rollout_path(folder: Path, step: int) -> Path:
    """The JSON file of a step; its arrays are beside it."""
    return folder / f"step-{step}.json"


def write_rollout(folder: Path, rollout: LoggedRollout) -> None:
    """Write the two files of one step, replacing older ones."""
    folder.mkdir(parents=True, exist_ok=True)
    samples, target = rollout.samples, rollout_path(folder, rollout.step)
    target.unlink(missing_ok=True)  # until the new arrays are there, the step is not whole
    arrays = {
        "prompt_lengths": np.array([len(s.prompt_ids) for s in samples], np.int64),
        "completion_lengths": np.array([len(s.completion_ids) for s in samples], np.int64),
        "prompt_ids": _joined([s.prompt_ids for s in samples], np.int32),
        "completion_ids": _joined([s.completion_ids for s in samples], np.int32),
        "logprobs": _joined([s.logprobs for s in samples], np.float32),
        "versions": _joined([s.versions for s in samples], np.int64),
    }
    if filtered := [s for s in samples if s.kept_counts is not None]:
        arrays["kept_counts"] = _joined([s.kept_counts for s in filtered], np.int32)
        arrays["kept_digests"] = _joined([s.kept_digests for s in filtered], np.uint64)
    if traces := [s.routing for s in samples if s.routing is not None]:
        arrays |= _routing_arrays(traces)
    file = target.with_suffix(".safetensors")
    partial = file.with_name(f".{file.name}.partial")
    save_file(arrays, partial)
    partial.chmod(0o644)  # it is written for its owner only
    partial.replace(file)
    records = [
        {
            "identity": dataclasses.asdict(sample.identity),
            "key": dataclasses.asdict(sample.key),
            "params": dataclasses.asdict(sample.params),
            "finish_reason": sample.finish_reason,
            "filtered": sample.kept_counts is not None,
            "routing": sample.routing is not None,
            "scale_set": sample.scale_set,
            "text": sample.text,
            "reward": reward,
            "advantage": advantage,
        }
        for sample, reward, advantage in zip(samples, rollout.rewards, rollout.advantages, strict=True)
    ]
    write_json(target, {"format": FORMAT, "step": rollout.step, "samples": records})


def read_rollout(folder: Path, step: int) -> LoggedRollout:
    """Inverse of `write_rollout`.

    Raises:
        CheckpointError: a file is missing, damaged, or of another format.
    """
    path = rollout_path(folder, step)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        arrays = load_file(path.with_suffix(".safetensors"))
        if content["format"] != FORMAT:
            raise CheckpointError(f"{path}: format {content['format']!r}, this build reads {FORMAT}")
        samples = _samples(content["samples"], arrays)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"{path}: not a whole rollout ({type(error).__name__}: {error})") from error
    records = content["samples"]
    return LoggedRollout(
        content["step"], tuple(samples), tuple(r["reward"] for r in records), tuple(r["advantage"] for r in records)
    )


def logged_steps(folder: Path) -> list[int]:
    """Steps of which the folder has a whole rollout, ascending."""
    names = (path.stem.removeprefix("step-") for path in folder.glob("step-*.json"))
    return sorted(int(name) for name in names if name.isdigit())


def _routing_arrays(traces: Sequence[RoutingTrace]) -> dict[str, np.ndarray]:
    """Experts and margins of every trace, token after token."""
    experts = np.concatenate([trace.experts for trace in traces])
    narrow = np.int8 if experts.size and experts.max() < 128 else np.int16
    margins = np.concatenate([trace.margins for trace in traces])
    return {"routing_experts": experts.astype(narrow), "routing_margins": margins}


def _traces(records: Sequence[dict[str, Any]], arrays: dict[str, np.ndarray]) -> list[RoutingTrace | None]:
    """A trace, or None, per sample; files of earlier builds say nothing of any."""
    recorded = np.array([bool(r.get("routing")) for r in records], bool)
    if not recorded.any():
        return [None] * len(records)
    lengths = (arrays["prompt_lengths"] + arrays["completion_lengths"] - 1)[recorded]
    experts, margins = arrays["routing_experts"], arrays["routing_margins"]
    whole = experts.dtype in (np.int8, np.int16) and margins.dtype == np.float32
    if not whole or experts.ndim != 3 or 0 in experts.shape[1:] or experts.shape[:2] != margins.shape:
        shapes = f"{experts.dtype} {experts.shape} with margins {margins.dtype} {margins.shape}"
        raise ValueError(f"{shapes} are no record of routing")
    parts = zip(_split(experts, lengths), _split(margins, lengths), strict=True)
    traces = iter([RoutingTrace(part.astype(np.int16), margin) for part, margin in parts])
    return [next(traces) if has else None for has in recorded]


def _joined(parts: Sequence[Any], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *(np.asarray(part, dtype) for part in parts)])


def _split(values: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    if len(values) != lengths.sum():
        raise ValueError(f"{len(values)} values for {lengths.sum()} tokens")
    return np.split(values, np.cumsum(lengths)[:-1]) if len(lengths) else []


def _samples(records: Sequence[dict[str, Any]], arrays: dict[str, np.ndarray]) -> list[Sample]:
    lengths = arrays["completion_lengths"]
    if len(lengths) != len(records):
        raise ValueError(f"{len(records)} records for {len(lengths)} samples")
    columns = {name: _split(arrays[name], lengths) for name in ("completion_ids", "logprobs", "versions")}
    prompts = _split(arrays["prompt_ids"], arrays["prompt_lengths"])
    filtered = np.array([r["filtered"] for r in records], bool)
    names = ("kept_counts", "kept_digests")
    kept = {name: iter(_split(arrays[name], lengths[filtered]) if filtered.any() else ()) for name in names}
    traces = _traces(records, arrays)
    samples = []
    for index, record in enumerate(records):
        params = dict(record["params"])
        stops = params["stop_token_ids"]
        params |= {"stop": tuple(params["stop"]), "stop_token_ids": None if stops is None else tuple(stops)}
        samples.append(
            Sample(
                prompt_ids=prompts[index],
                completion_ids=columns["completion_ids"][index],
                logprobs=columns["logprobs"][index],
                versions=columns["versions"][index],
                identity=Identity(**record["identity"]),
                key=SamplingKey(**record["key"]),
                params=SamplingParams(**params),
                finish_reason=record["finish_reason"],
                kept_counts=next(kept["kept_counts"]) if filtered[index] else None,
                kept_digests=next(kept["kept_digests"]) if filtered[index] else None,
                scale_set=record["scale_set"],
                text=record["text"],
                routing=traces[index],
            )
        )
    return samples
