"""Records of data sets on disk and on the hub: JSON lines, JSON arrays, parquet, folders of them, `datasets`.

A record is a mapping of column to value with the place where it stands (`train.parquet:17`: its 17th record; in a
JSON-lines file the 17th line). Parquet needs pyarrow, saved and hub data sets need `datasets`; both are an extra, asked
for by name where they are missing.
"""

import importlib.util
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from zerogap.config import DataSource
from zerogap.errors import ConfigError

Record = Mapping[str, Any]
Records = Iterator[tuple[str, Record]]

HUB = "hf:"
OTHER_SPLITS = ("test", "eval", "valid", "dev")  # beginnings of files that are not for training
KINDS = "a .jsonl, .json or .parquet file, a folder with such files, a folder saved by datasets, or hf:NAME"


def is_data_set(path: str) -> bool:
    """Whether it is a data set of files rather than the name of a task."""
    return path.startswith(HUB) or Path(path).suffix in READERS or Path(path).is_dir()


def read_records(source: DataSource, key: str, split: str) -> tuple[str, list[tuple[str, Record]]]:
    """All records of a data set, and a name for it with its split.

    Args:
        source: its path and perhaps its split.
        key: of the recipe, for messages.
        split: what to take where the source names none and there are several.

    Raises:
        ConfigError: names the key, or file and row: a missing, empty or malformed file, a missing split or library.
    """
    path = source.path
    if path.startswith(HUB):
        return _hub(source, key, split)
    file = Path(path).expanduser()
    if file.is_dir():
        return _folder(file, source, key, split)
    if source.split is not None:
        raise ConfigError(f"{key}.split", source.split, f"leave it out: {path} is a single file")
    return path, _file(file, path, key)


def _file(file: Path, shown: str, key: str) -> list[tuple[str, Record]]:
    if not file.is_file():
        raise ConfigError(key, shown, f"no such file; give {KINDS}")
    records = list(READERS[file.suffix](file, shown, key))
    if not records:
        raise ConfigError(key, shown, "the file has 0 rows")
    return records


# ---------------------------------------------------------------------------------------------------- JSON


def _text(file: Path, shown: str, key: str) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(key, shown, f"not UTF-8 text: {error}") from None
    except OSError as error:
        raise ConfigError(key, shown, f"it cannot be read: {error.strerror}") from None


def _lines(file: Path, shown: str, key: str) -> Records:
    """A byte-order mark and CRLF are allowed, blank lines ignored."""
    for number, line in enumerate(_text(file, shown, key).split("\n"), 1):
        if line.strip():
            where = f"{shown}:{number}"
            yield where, _checked(_parse(line, where), where)


def _array(file: Path, shown: str, key: str) -> Records:
    """A JSON array of objects; a file of that name may hold JSON lines, too."""
    text = _text(file, shown, key)
    if text.lstrip()[:1] == "{":
        yield from _lines(file, shown, key)
        return
    if not text.strip():
        return
    content = _parse(text, shown)
    if not isinstance(content, list):
        raise ConfigError(key, shown, "a .json file holds an array of rows, or a row per line")
    for number, record in enumerate(content, 1):
        yield f"{shown}:{number}", _checked(record, f"{shown}:{number}")


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(where, text[:60], f"not JSON: {error}") from None
    except ValueError as error:  # a number of more digits than Python reads
        raise ConfigError(where, text[:60], f"not readable: {error}") from None


def _checked(record: Any, where: str) -> Record:
    if not isinstance(record, dict):
        raise ConfigError(where, str(record)[:60], "a row is a JSON object")
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ConfigError(
            where, ascii(record)[:60], "it holds half of a surrogate pair, which is not a character"
        ) from None
    return record


# ---------------------------------------------------------------------------------------------------- parquet


def _parquet(file: Path, shown: str, key: str) -> Records:
    _require("pyarrow", key, shown)
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(file) as opened:
            number = 0
            for batch in opened.iter_batches():
                for record in batch.to_pylist():
                    number += 1
                    yield f"{shown}:{number}", record
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise ConfigError(key, shown, f"not a readable parquet file: {str(error).splitlines()[0]}") from None


READERS: dict[str, Callable[[Path, str, str], Records]] = {
    ".jsonl": _lines,
    ".json": _array,
    ".parquet": _parquet,
}


def _require(library: str, key: str, shown: str) -> None:
    if importlib.util.find_spec(library) is None:
        raise ConfigError(key, shown, f"reading it needs {library}: pip install 'zerogap[data]'")


# ---------------------------------------------------------------------------------------------------- folders, hub


def _folder(folder: Path, source: DataSource, key: str, split: str) -> tuple[str, list[tuple[str, Record]]]:
    """A data set saved by `datasets`, or the files of a split: those whose name begins with it, here or in `data/`."""
    shown = source.path
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        return _saved(folder, source, key, split)
    files = sorted(f for place in (folder, folder / "data") for f in place.glob("*") if f.suffix in READERS)
    if not files:
        raise ConfigError(key, shown, f"there is nothing in it that can be read; give {KINDS}")
    wanted = source.split or split
    chosen = [f for f in files if re.match(rf"{re.escape(wanted)}([-_.]|$)", f.name)]
    if not chosen and source.split is None and not any(f.name.startswith(OTHER_SPLITS) for f in files):
        chosen = files
    if not chosen:
        names = ", ".join(f.name for f in files[:6])
        raise ConfigError(f"{key}.split", wanted, f"{shown} has no file of that name, but {names}")
    name = f"{shown} ({', '.join(f.name for f in chosen[:4])}{', ...' if len(chosen) > 4 else ''})"
    return name, [record for f in chosen for record in _file(f, f"{shown}/{f.relative_to(folder)}", key)]


def _saved(folder: Path, source: DataSource, key: str, split: str) -> tuple[str, list[tuple[str, Record]]]:
    _require("datasets", key, source.path)
    import datasets

    try:
        found = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(key, source.path, f"datasets cannot load it: {error}") from None
    if isinstance(found, datasets.DatasetDict):
        wanted = source.split or split
        if wanted not in found:
            raise ConfigError(f"{key}.split", wanted, f"{source.path} has the splits {', '.join(found)}")
        return f"{source.path} (split {wanted})", _records(found[wanted], source.path, key)
    if source.split is not None:
        raise ConfigError(f"{key}.split", source.split, f"leave it out: {source.path} has no splits")
    return source.path, _records(found, source.path, key)


def _hub(source: DataSource, key: str, split: str) -> tuple[str, list[tuple[str, Record]]]:
    """`hf:NAME[:config][:split]`; NAME may be a local folder, which `datasets` then reads by its own rules."""
    _require("datasets", key, source.path)
    import datasets

    name, _, rest = source.path.removeprefix(HUB).partition(":")
    config, _, own = rest.partition(":")
    if own and source.split is not None:
        raise ConfigError(f"{key}.split", source.split, f"{source.path} names one already")
    wanted = own or source.split or split
    try:
        found = datasets.load_dataset(name, config or None, split=wanted)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(key, source.path, f"datasets cannot load split {wanted!r}: {text}") from None
    return f"{source.path} (split {wanted})", _records(found, source.path, key)


def _records(found: Any, shown: str, key: str) -> list[tuple[str, Record]]:
    """All rows as Python objects, whatever format the data set was saved with."""
    if not len(found):
        raise ConfigError(key, shown, "the data set has 0 rows")
    return [(f"{shown}:{number}", record) for number, record in enumerate(found.with_format(None), 1)]
