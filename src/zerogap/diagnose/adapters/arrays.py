"""Two traces from plain arrays: token ids and two log-prob arrays, from memory or from an npz, parquet or jsonl file.

This is the least that a training loop can give: enough for raw statistics, worst tokens and what a log-prob means, not
for naming weights or operators; the checks say what else to record. Nothing is guessed from values: where an array does
not say which tokens it belongs to, it is refused. `FIELDS` lists the names that files may use.
"""

import json
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from zerogap.diagnose.trace import Definition, Pass, SequenceTrace, Trace
from zerogap.errors import CheckpointError, ConfigError

# Field -> names by which stacks call it; the first is ours. `a` is the rollout's number, `b` the trainer's.
FIELDS: Mapping[str, tuple[str, ...]] = {
    "ids": ("ids", "token_ids", "input_ids", "tokens"),
    "a": ("logprobs_a", "rollout_logprobs", "generation_logprobs", "rollout_log_probs", "sampling_per_token_logps"),
    "b": ("logprobs_b", "trainer_logprobs", "prev_logprobs", "old_log_probs", "old_per_token_logps"),
    "length": ("length", "lengths", "input_lengths"),
    "prompt_length": ("prompt_length", "prompt_lengths"),
    "mask": ("mask", "loss_mask", "token_loss_mask", "token_mask", "completion_mask", "response_mask"),
    "positions": ("positions", "position_ids"),
    "versions": ("versions", "weight_versions"),
    "temperature": ("temperature",),
    "processed": ("processed",),
}
Row = Mapping[str, Any]


def load_arrays(path: Path, definition: Definition | None = None) -> tuple[Trace, Trace]:
    """Read a file of ids and two log-prob arrays.

    An npz holds rectangles [B, N] with `length` [B], or concatenated sequences with `length`; parquet and jsonl hold
    one sequence per row. `temperature` and `processed` may be given once or per row (they must agree).

    Args:
        path: the suffix says which.
        definition: what the log-probs of both sides mean, if the file does not say.

    Returns:
        The rollout's trace and the trainer's.

    Raises:
        CheckpointError: not such a file, or damaged.
        ConfigError: a field is missing or its length fits no sequence; names row and field.
    """
    readers = {".npz": _read_npz, ".parquet": _read_parquet, ".jsonl": read_jsonl, ".json": read_jsonl}
    if path.suffix not in readers:
        raise ConfigError("arrays", str(path), f"give a file of one of these kinds: {', '.join(readers)}")
    rows = readers[path.suffix](path)
    return pair_of_traces(rows, name=path.name, definition=definition)


def pair_of_traces(
    rows: Iterable[Row],
    *,
    name: str = "arrays",
    names: tuple[str, str] = ("rollout", "trainer"),
    definition: Definition | None = None,
    settings: Mapping[str, Any] | None = None,
) -> tuple[Trace, Trace]:
    """Two traces from one mapping per sequence, with the fields of `FIELDS` under any of their names.

    Log-probs may come one per token (entry i for token i), one fewer (the first token has none), or for the completion
    only (then `prompt_length` + their number is the sequence's length). What is not counted becomes NaN: many stacks
    write zeros there. A rollout decodes its tokens and a trainer scores them whole: the traces say so.
    """
    given = [_named(row, i) for i, row in enumerate(rows)]
    if not given:
        raise ConfigError("rows", 0, "give at least one sequence")
    sequences = tuple(_sequence(row, i) for i, row in enumerate(given))
    definition = definition or _definition(given)
    traces = []
    for side, words, path in zip(("a", "b"), names, ("decode", "whole")):
        logprobs = tuple(_logprobs(row, side, s, i) for i, (row, s) in enumerate(zip(given, sequences)))
        found = Pass(logprobs=logprobs, path=path, definition=definition, note=f"read from {name}")
        traces.append(Trace(f"{words} ({name})", sequences, (found,), settings=dict(settings or {})))
    return traces[0], traces[1]


def _named(row: Row, index: int) -> dict[str, Any]:
    """The row under our names, its padding cut off."""
    found = {}
    for field, names in FIELDS.items():
        given = [n for n in names if row.get(n) is not None]
        if len(given) > 1:
            raise ConfigError(f"row {index}", given, f"give {field} once")
        if given:
            found[field] = row[given[0]]
    for field in ("ids", "a", "b"):
        if field not in found:
            raise ConfigError(f"row {index}", sorted(row), f"add {field}: one of {', '.join(FIELDS[field])}")
    _plain(found, index)
    if "length" in found:
        length, size = whole(found["length"], f"row {index}.length"), len(found["ids"])
        if not 0 <= length <= size:
            raise ConfigError(f"row {index}.length", length, f"the row has {size} ids")
        for field in ("ids", "a", "b", "mask", "positions", "versions"):
            if field in found and len(found[field]) in (size, size - 1):  # log-probs may start at the second token
                found[field] = found[field][: max(0, length - size + len(found[field]))]
    return found


def _plain(row: Row, index: int) -> None:
    """Refuse ids that are not one list of whole numbers."""
    for field in ("ids", "a", "b", "mask", "positions", "versions"):
        if field in row and not isinstance(row[field], list | tuple | np.ndarray):
            raise ConfigError(f"row {index}.{field}", type(row[field]).__name__, "give one list per sequence")
        if field in row and isinstance(row[field], np.ndarray) and row[field].ndim != 1:
            raise ConfigError(f"row {index}.{field}", row[field].shape, "give one list per sequence")
    for field in ("ids", "positions", "versions"):
        for value in row.get(field, ()):
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or not -1 <= value < 2**31:
                raise ConfigError(
                    f"row {index}.{field}", value, "give one list of token ids or the like: whole numbers below 2^31"
                )


def whole(value: Any, key: str) -> int:
    """A whole number, however it is written."""
    if isinstance(value, np.ndarray | np.generic) and value.ndim == 0:
        value = value.item()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(key, value, "give one whole number per sequence")
    return value


def as_mask(value: Any, key: str) -> np.ndarray:
    """bool [N] from truth values or from numbers 0 and 1."""
    found = np.asarray(value)
    if found.ndim != 1 or found.dtype.kind not in "biuf" or not np.isin(found, (0, 1)).all():
        raise ConfigError(key, str(found.reshape(-1)[:4]), "give one 0 or 1 per token")
    return found.astype(bool)


def _sequence(row: Row, index: int) -> SequenceTrace:
    ids = np.asarray(row["ids"], np.int32)
    if ids.ndim != 1:
        raise ConfigError(f"row {index}.ids", ids.shape, "give one list of token ids per sequence")
    mask = as_mask(row["mask"], f"row {index}.mask") if "mask" in row else None
    if mask is not None and len(mask) < len(ids):  # of the completion only
        mask = np.concatenate([np.zeros(len(ids) - len(mask), bool), mask])
    if "prompt_length" in row:
        prompt = whole(row["prompt_length"], f"row {index}.prompt_length")
    elif mask is not None:
        prompt = int(np.flatnonzero(mask)[0]) if mask.any() else len(ids)
    else:
        short = min(len(row["a"]), len(row["b"]))
        if short >= len(ids) - 1:
            raise ConfigError(f"row {index}", "no prompt_length", "add prompt_length or mask: which tokens count")
        prompt = len(ids) - short
    positions, versions = (np.asarray(row[n]) if n in row else None for n in ("positions", "versions"))
    return SequenceTrace(ids, prompt, mask, positions=positions, versions=versions)


def _logprobs(row: Row, side: str, sequence: SequenceTrace, index: int) -> np.ndarray:
    """float32 [N], NaN where the token does not count."""
    try:
        values = np.asarray(row[side], np.float32)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"row {index}.{FIELDS[side][0]}", str(error), "give one list of numbers") from error
    size, completion = len(sequence.ids), len(sequence.ids) - sequence.prompt_length
    if values.ndim != 1 or len(values) not in (size, size - 1, completion):
        mend = f"give {size} numbers (one per token), {size - 1} (from the second on) or {completion} (the completion)"
        raise ConfigError(f"row {index}.{FIELDS[side][0]}", values.shape, mend)
    full = np.full(size, np.nan, np.float32)
    full[size - len(values) :] = values
    return np.where(sequence.counted, full, np.float32(np.nan)).astype(np.float32)


def _definition(rows: Sequence[Row]) -> Definition:
    said: dict[str, Any] = {}
    for field in ("temperature", "processed"):
        values = [row[field].item() if hasattr(row[field], "item") else row[field] for row in rows if field in row]
        if any(value != values[0] for value in values):
            raise ConfigError(field, values[:4], "give rows of one setting in one file")
        said[field] = values[0] if values else None
    temperature, processed = said["temperature"], said["processed"]
    number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    if temperature is not None and not (number and 0 <= temperature < np.inf):
        raise ConfigError("temperature", temperature, "give a number from 0 on")
    if processed is not None and processed not in (True, False):
        raise ConfigError("processed", processed, "give true or false")
    return Definition(
        temperature=None if temperature is None else float(temperature),
        processed=None if processed is None else bool(processed),
    )


def _read_npz(path: Path) -> list[Row]:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path} is not an npz of plain arrays: {error}") from error
    ids = next((arrays[n] for n in FIELDS["ids"] if n in arrays), None)
    if ids is None:
        raise ConfigError(str(path), sorted(arrays), f"add ids: one of {', '.join(FIELDS['ids'])}")
    if ids.ndim == 2:
        for name, array in arrays.items():
            if array.ndim and len(array) != len(ids):
                raise ConfigError(name, len(array), f"give one row per sequence: {len(ids)}")
        return [{n: a[i] if a.ndim else a.item() for n, a in arrays.items()} for i in range(len(ids))]
    if ids.ndim != 1:
        raise ConfigError("ids", ids.shape, "give [B, N], or the ids of all sequences in a row")
    lengths = next((arrays[n] for n in FIELDS["length"] if n in arrays), np.array([len(ids)])).reshape(-1)
    lengths = np.array([whole(n, "length") for n in lengths])
    if (lengths < 0).any():
        raise ConfigError("length", lengths.tolist(), "give lengths from 0 on")
    if lengths.sum() != len(ids):
        raise ConfigError("length", int(lengths.sum()), f"give lengths that add up to the {len(ids)} ids")
    ends = np.cumsum(lengths)[:-1]
    split = {n: np.split(a, ends) if len(a) == len(ids) else a for n, a in arrays.items() if a.ndim}
    plain = {n: a.item() for n, a in arrays.items() if not a.ndim}
    lists = {n: a for n, a in split.items() if n not in FIELDS["length"]}
    for name, values in lists.items():
        if len(values) != len(lengths):
            raise ConfigError(name, len(values), f"give one number per token ({len(ids)}) or sequence ({len(lengths)})")
    return [{**plain, **{n: values[i] for n, values in lists.items()}} for i in range(len(lengths))]


def read_jsonl(path: Path) -> list[Row]:
    """One JSON object per line, blank lines skipped.

    Raises:
        CheckpointError: anything else; names the line.
    """
    rows = []
    try:
        for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), 1):
            if line.strip():
                rows.append(json.loads(line))
                if not isinstance(rows[-1], dict):
                    raise CheckpointError(f"{path}:{number}: each line must be one sequence, a JSON object")
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not readable as JSON lines: {error}") from error
    return rows


def _read_parquet(path: Path) -> list[Row]:
    if find_spec("pyarrow") is None:
        raise ConfigError("arrays", str(path), "install pyarrow to read parquet, or write jsonl or npz")
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise CheckpointError(f"{path} is not a readable parquet file: {error}") from error
