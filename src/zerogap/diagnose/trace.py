"""A trace: what one side computed, recorded so that another program can compare it later. docs/trace-format.md.

On disk a trace is a folder with `trace.json` (facts) and `tensors.safetensors` (arrays). Rows are tokens: R rows are
all sequences' tokens, prompt and completion, one sequence after another; padded rows never enter a trace. A trace holds
one or more passes over the same sequences (as recorded, again, alone, decoded token by token, ...): the first is the
side's answer, the others say whether the side agrees with itself.
"""

import dataclasses
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from zerogap.errors import CheckpointError, ConfigError

FORMAT, VERSION = "zerogap-trace", 1
PATHS = ("whole", "decode", "chunked", "prefix_hit", "speculative")


@dataclasses.dataclass(frozen=True)
class Definition:
    """What a recorded log-prob means; None where the side did not say.

    Attributes:
        temperature: of the distribution that tokens were drawn from.
        processed: True if the log-prob is under that distribution (temperature and filters applied), False if it is
            under the model's own (raw).
        top_k, top_p, min_p: filters of the kept set; 0, 1.0 and 0.0 are off.
    """

    temperature: float | None = None
    processed: bool | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class SequenceTrace:
    """One sequence of N tokens.

    Attributes:
        ids: int32 [N] prompt and completion.
        prompt_length: tokens of the prompt.
        mask: bool [N] True where the token counts (by default the completion).
        positions: int32 [N], or None for 0..N-1.
        finish_reason: as the engine said it, or empty.
        hit_length: tokens taken from a prefix cache, or None if not known.
        versions: int64 [N] weight version that each token was computed with, or None.
        scale_set: name of the KV scale set, or empty.
        experts, margins: int16 [N, L, k] and float32 [N, L] of a routed model, or None.
    """

    ids: np.ndarray
    prompt_length: int
    mask: np.ndarray | None = None
    positions: np.ndarray | None = None
    finish_reason: str = ""
    hit_length: int | None = None
    versions: np.ndarray | None = None
    scale_set: str = ""
    experts: np.ndarray | None = None
    margins: np.ndarray | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.prompt_length <= len(self.ids):
            raise ConfigError("prompt_length", self.prompt_length, f"the sequence has {len(self.ids)} tokens")
        for name in ("mask", "positions", "versions", "experts", "margins"):
            value = getattr(self, name)
            if value is not None and len(value) != len(self.ids):
                raise ConfigError(name, len(value), f"give one entry per token: {len(self.ids)}")

    @property
    def counted(self) -> np.ndarray:
        """bool [N]: `mask`, or the completion."""
        return np.arange(len(self.ids)) >= self.prompt_length if self.mask is None else self.mask


@dataclasses.dataclass(frozen=True, eq=False)
class Pass:
    """One computation over all sequences of a trace.

    Attributes:
        logprobs: float32 per sequence [N]; entry i is the log-prob of `ids[i]`, NaN where none was recorded.
        path: one of `PATHS`: how the tokens were computed.
        batches: which sequences shared a forward pass, in order; None if not known.
        definition: what these log-probs mean.
        boundaries: node name (`graph.py`) or foreign module name -> tensor [R, width] in the dtype it was computed in.
        meaning: further words on a boundary (`residual included`, ...), by name.
        note: what is special about this pass.
    """

    logprobs: tuple[np.ndarray, ...]
    path: str = "whole"
    batches: tuple[tuple[int, ...], ...] | None = None
    definition: Definition = Definition()
    boundaries: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    meaning: Mapping[str, str] = dataclasses.field(default_factory=dict)
    note: str = ""

    def __post_init__(self) -> None:
        if self.path not in PATHS:
            raise ConfigError("path", self.path, f"choose one of {', '.join(PATHS)}")


@dataclasses.dataclass(frozen=True, eq=False)
class Trace:
    """One side. Attributes:
    name: for people, e.g. `vllm 0.32, rollout`.
    sequences, passes: see there; at least one pass.
    weights, buffers: name -> JSON-ready record of `sketch.sketch` (digests and samples); empty if not recorded.
    settings: sampling settings and options as the stack calls them.
    model: the Hugging Face config as a dictionary, or empty; `source`: folder of the weights, or empty.
    versions: library -> version; `layout`: tensor/expert/data parallel sizes, engine flags.
    """

    name: str
    sequences: tuple[SequenceTrace, ...]
    passes: tuple[Pass, ...]
    weights: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    buffers: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    model: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    source: str = ""
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    layout: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.passes:
            raise ConfigError("passes", 0, "a trace holds at least one pass")
        for found in self.passes:
            if [len(p) for p in found.logprobs] != [len(s.ids) for s in self.sequences]:
                raise ConfigError("logprobs", found.note or found.path, "give one number per token of each sequence")
            for name, tensor in found.boundaries.items():
                if len(tensor) != self.num_rows:
                    raise ConfigError(f"boundaries.{name}", len(tensor), f"give one row per token: {self.num_rows}")

    @property
    def num_rows(self) -> int:
        """Tokens of all sequences."""
        return sum(len(s.ids) for s in self.sequences)

    @property
    def recorded(self) -> Pass:
        """The side's answer."""
        return self.passes[0]


_ARRAYS = ("mask", "positions", "versions", "experts", "margins")


def save_trace(trace: Trace, folder: Path) -> Path:
    """Write the trace's folder, whole or not at all; an older trace of that name is replaced only then.

    Raises:
        ConfigError: the folder exists and is no trace.
    """
    if folder.exists() and not (folder / "trace.json").is_file():
        raise ConfigError("trace", str(folder), "choose a new folder: this one exists and holds no trace")
    tensors: dict[str, torch.Tensor] = {}
    facts: dict[str, Any] = {"format": FORMAT, "version": VERSION}
    for name in ("name", "weights", "buffers", "settings", "model", "source", "versions", "layout"):
        facts[name] = getattr(trace, name)
    facts["sequences"] = [_pack_sequence(s, i, tensors) for i, s in enumerate(trace.sequences)]
    facts["passes"] = [_pack_pass(p, i, tensors) for i, p in enumerate(trace.passes)]
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file(tensors, partial / "tensors.safetensors")
    (partial / "trace.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return folder


def load_trace(folder: Path) -> Trace:
    """Read a trace's folder.

    Raises:
        CheckpointError: it is not a trace, of a newer version, or damaged; names file and field.
    """
    path = folder / "trace.json"
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        tensors = load_file(folder / "tensors.safetensors")
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, SafetensorError, RecursionError) as error:
        raise CheckpointError(f"{folder} is not a readable trace (trace.json, tensors.safetensors): {error}") from error
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise CheckpointError(f"{path}: format must be {FORMAT!r}")
    if facts.get("version") != VERSION:
        raise CheckpointError(f"{path}: version {facts.get('version')!r}; this build reads {VERSION}")
    try:
        sequences = tuple(_unpack_sequence(s, i, tensors) for i, s in enumerate(facts["sequences"]))
        lengths = [len(s.ids) for s in sequences]
        passes = tuple(_unpack_pass(p, i, tensors, lengths) for i, p in enumerate(facts["passes"]))
        rest = ("weights", "buffers", "settings", "model", "source", "versions", "layout")
        given = {name: facts[name] for name in rest if name in facts}  # a trace written by hand may leave them out
        return Trace(facts["name"], sequences, passes, **given)
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path}: {type(error).__name__}: {error}") from error


def _pack_sequence(sequence: SequenceTrace, index: int, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    facts = {n: getattr(sequence, n) for n in ("prompt_length", "finish_reason", "hit_length", "scale_set")}
    tensors[f"sequence.{index}.ids"] = torch.from_numpy(np.ascontiguousarray(sequence.ids, np.int32))
    for name in _ARRAYS:
        if (value := getattr(sequence, name)) is not None:
            tensors[f"sequence.{index}.{name}"] = torch.from_numpy(np.ascontiguousarray(value))
    return facts


def _unpack_sequence(facts: Mapping[str, Any], index: int, tensors: Mapping[str, torch.Tensor]) -> SequenceTrace:
    arrays = {n: tensors.get(f"sequence.{index}.{n}") for n in _ARRAYS}
    given: dict[str, Any] = {n: None if value is None else value.numpy() for n, value in arrays.items()}
    return SequenceTrace(ids=tensors[f"sequence.{index}.ids"].numpy(), **facts, **given)


def _pack_pass(found: Pass, index: int, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    joined = np.concatenate([np.zeros(0, np.float32), *found.logprobs])
    tensors[f"pass.{index}.logprobs"] = torch.from_numpy(joined.astype(np.float32))
    for name, tensor in found.boundaries.items():
        tensors[f"pass.{index}.boundary.{name}"] = tensor.detach().contiguous().clone()
    facts = {n: getattr(found, n) for n in ("path", "batches", "meaning", "note")}
    return {**facts, "definition": dataclasses.asdict(found.definition)}


def _unpack_pass(
    facts: Mapping[str, Any], index: int, tensors: Mapping[str, torch.Tensor], lengths: Sequence[int]
) -> Pass:
    prefix = f"pass.{index}.boundary."
    logprobs = tensors[f"pass.{index}.logprobs"].split(list(lengths))
    batches = facts.get("batches")
    return Pass(
        logprobs=tuple(p.numpy() for p in logprobs),
        path=facts.get("path", "whole"),
        batches=None if batches is None else tuple(tuple(b) for b in batches),
        definition=Definition(**facts.get("definition", {})),
        boundaries={name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)},
        meaning=facts.get("meaning", {}),
        note=facts.get("note", ""),
    )


def json_ready(value: Any) -> Any:
    """Settings as JSON holds them: dtypes by name, what JSON has no word for as text."""
    if isinstance(value, Mapping):
        return {str(k): json_ready(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_ready(v) for v in value]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
