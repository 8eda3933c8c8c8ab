"""From a record of any data set to a row: its prompt as chat messages, its answer, and every other column unchanged.

Columns are recognised by their names in the first record, and what was taken for what is told. Rows of TRL (`prompt` as
text or messages, any other columns) and of verl (`data_source`, `prompt`, `reward_model.ground_truth`, `extra_info`)
are rows like any other. Every fault names file, row and column.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from zerogap.config import DataSource
from zerogap.errors import ConfigError

PROMPT_COLUMNS = ("prompt", "question", "problem", "query", "instruction", "input", "messages")
ANSWER_COLUMNS = ("answer", "solution", "ground_truth", "label", "target")
VERL_ANSWER = "reward_model.ground_truth"
ROLES = ("system", "user", "assistant", "tool")
SHOWN = 120  # characters of the first prompt in a summary

Message = dict[str, str]
Record = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """One prompt.

    Attributes:
        name: where it stands (`train.jsonl:17`, `multiplication:3`), for messages.
        prompt: chat messages; the last one is the user's (or a tool's).
        columns: every column of the row but the prompt, unchanged; `answer` is there whatever its column was called.
        source: path of its data set, as the recipe names it.
        part: number of its data set in `data.train`.
    """

    name: str
    prompt: tuple[Message, ...]
    columns: Mapping[str, Any]
    source: str = ""
    part: int = 0


@dataclasses.dataclass(frozen=True)
class Columns:
    """What of a record is what.

    Attributes:
        prompt, answer: names of columns; `answer` may be one inside a column (`reward_model.ground_truth`), or None.
        verl: rows are in verl's form.
        notes: lines for people: what was taken and why, what else there is.
    """

    prompt: str
    answer: str | None
    verl: bool
    notes: tuple[str, ...]


def recognise(where: str, first: Record, source: DataSource, needs_answer: bool) -> Columns:
    """Tell a data set's columns from its first record.

    Raises:
        ConfigError: no prompt column, or none with an answer where a reward needs one.
    """
    verl = "data_source" in first and "reward_model" in first
    prompt = source.prompt_column or _named(first, PROMPT_COLUMNS)
    if prompt is None:
        mend = f"no prompt column; name it one of {', '.join(PROMPT_COLUMNS)}, or set data.prompt_column"
        raise ConfigError(where, sorted(first), mend)
    answer = source.answer_column or (VERL_ANSWER if verl else _named(first, ANSWER_COLUMNS, prompt))
    if answer is None and needs_answer:
        mend = f"no answer column; name it one of {', '.join(ANSWER_COLUMNS)}, or set data.answer_column"
        raise ConfigError(where, sorted(first), mend)
    why = "as the recipe says" if source.prompt_column else "recognised by its name"
    also = [f"`{name}`" for name in PROMPT_COLUMNS if name in first and name != prompt]
    notes = [f"prompt from column `{prompt}` ({why}{'; also there: ' + ', '.join(also) if also else ''})"]
    if answer is None:
        notes.append("answer from nowhere: no column is called " + ", ".join(f"`{name}`" for name in ANSWER_COLUMNS))
    else:
        why = "as the recipe says" if source.answer_column else "verl's" if verl else "recognised by its name"
        hides = "; the file's own column `answer` is not used" if answer != "answer" and "answer" in first else ""
        notes.append(f"answer from column `{answer}` ({why}{hides})")
    return Columns(prompt, answer, verl, tuple(notes))


def read_rows(
    records: Iterable[tuple[str, Record]], source: DataSource, part: int, needs_answer: bool
) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    """Rows of a data set, and the lines of its summary.

    Args:
        records: (where it stands, column -> value) of each record; at least one.
        source: names of columns, where the recipe gives them.
        part: number of the data set.
        needs_answer: refuse a row whose answer is neither a text nor a number.

    Raises:
        ConfigError: names file, row and column.
    """
    columns, rows = None, []
    for where, record in records:
        if columns is None:
            columns = recognise(where, record, source, needs_answer)
        rows.append(_read_row(where, record, columns, source.path, part, needs_answer))
    assert columns is not None, "an empty data set is refused by its reader"
    others = sorted({key for row in rows for key in row.columns} - {"answer", columns.answer})
    notes = [f"{len(rows):,} rows", *columns.notes]
    if others:
        notes.append(f"other columns, given to rewards: {', '.join(others)}")
    text = " ".join(rows[0].prompt[-1]["content"].split())
    notes.append(f"first prompt: {text[:SHOWN]}{'...' if len(text) > SHOWN else ''}")
    return tuple(rows), tuple(notes)


def _named(record: Record, names: Sequence[str], but: str = "") -> str | None:
    return next((name for name in names if name in record and name != but), None)


def _read_row(where: str, record: Record, columns: Columns, source: str, part: int, needs_answer: bool) -> Row:
    place = f"{where} column {columns.prompt}"
    if columns.prompt not in record:
        raise ConfigError(place, None, "the row has no such column, other rows do")
    prompt = plain(record[columns.prompt])
    if columns.verl and isinstance(prompt, str):
        raise ConfigError(place, prompt[:60], "in a verl-style file the prompt is a list of messages")
    messages = as_messages(prompt, place)
    kept = {key: plain(value) for key, value in record.items() if key != columns.prompt}
    if columns.answer is not None:
        value: Any = kept
        for name in (columns.answer,) if columns.answer in kept else columns.answer.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        place = f"{where} column {columns.answer}"
        blank = value is None or (isinstance(value, str) and not value.strip())
        if needs_answer and (blank or isinstance(value, bool) or not isinstance(value, str | int | float)):
            raise ConfigError(place, value, "the answer is missing; give a text or a number")
        kept["answer"] = value
    return Row(where, messages, kept, source, part)


def as_messages(value: object, place: str) -> tuple[Message, ...]:
    """A prompt value as chat messages.

    Raises:
        ConfigError: it is neither a text nor messages that end with the user's (or a tool's).
    """
    if isinstance(value, str):
        if not value.strip():
            raise ConfigError(place, value, "the prompt is empty")
        return ({"role": "user", "content": value},)
    if not isinstance(value, list) or not value:
        raise ConfigError(place, value, "a prompt is a text or a list of messages")
    messages = []
    for message in value:
        if isinstance(message, dict):  # columnar files give every message the keys of all
            message = {key: entry for key, entry in message.items() if entry is not None or key in ("role", "content")}
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise ConfigError(place, message, "a message has exactly `role` and `content`")
        if message["role"] not in ROLES:
            raise ConfigError(place, message["role"], f"choose a role of {', '.join(ROLES)}")
        if not isinstance(message["content"], str) or (message["role"] == "user" and not message["content"].strip()):
            raise ConfigError(place, message["content"], "the content of a message is a text that is not empty")
        messages.append(message)
    if all(m["role"] != "user" for m in messages):
        raise ConfigError(place, [m["role"] for m in messages], "there is no user message")
    if messages[-1]["role"] not in ("user", "tool"):
        raise ConfigError(place, messages[-1]["role"], "the last message must be the user's")
    return tuple(messages)


def plain(value: Any) -> Any:
    """The value with NumPy's arrays and numbers, which some files hold, as Python's lists and numbers."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    elif isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {key: plain(entry) for key, entry in value.items()}
    return [plain(entry) for entry in value] if isinstance(value, list | tuple) else value
