"""Prompts: rows of a JSONL file, of a reasoning-gym task, or of a built-in task, and the order they are trained in.

Every fault of a file is found here, before a model is loaded, and named by file, line and column. Prompts are chat
messages. Values of a row reach reward functions unchanged, and stay with their row: rows are named by index, never by
their text. The order of rows is a pure function of (seed, epoch, index), so a run resumes from a plain position.
"""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zerogap.config import DataConfig
from zerogap.errors import ConfigError
from zerogap.rl import tasks

PROMPT_COLUMNS = ("prompt", "question", "problem", "input", "messages")
ANSWER_COLUMNS = ("answer", "solution", "ground_truth", "label", "target")
ROLES = ("system", "user", "assistant", "tool")

Message = dict[str, str]


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """One prompt.

    Attributes:
        name: where it stands (`train.jsonl:17`, `multiplication:3`), for messages.
        prompt: chat messages; the last one is the user's (or a tool's).
        columns: every column of the row but the prompt, unchanged; `answer` is there whatever its column was called.
    """

    name: str
    prompt: tuple[Message, ...]
    columns: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class PromptSet:
    """What a recipe's `data` section stands for.

    Attributes:
        train: rows to train on.
        held_out: rows to evaluate on; none of their prompts is trained on. May be empty.
        summary: lines for people: which columns were recognised, how many rows there are, what was left out.
        scorer: (completion text, row) -> reward, for tasks that bring their own.
    """

    train: tuple[Row, ...]
    held_out: tuple[Row, ...]
    summary: tuple[str, ...]
    scorer: Callable[[str, Row], float] | None = None


def load_prompts(config: DataConfig, seed: int, needs_answer: bool) -> PromptSet:
    """Load what `data` names.

    Args:
        config: the recipe's section.
        seed: of reasoning-gym problems. The built-in tasks are the same for every seed.
        needs_answer: True if a reward function needs the answer column, so that a row without one is refused.

    Raises:
        ConfigError: names file, line and column, or the key of the recipe.
    """
    source = config.train
    scorer = None
    if source.startswith("reasoning_gym:"):
        name = source.partition(":")[2]
        train_items, held_items, score = tasks.reasoning_gym(name, config.size, seed, config.task)
        train, held_out = _task_rows(source, train_items), _task_rows(f"{source}/held-out", held_items)

        def scorer(text: str, row: Row) -> float:
            return score(text, row.columns["entry"])

    elif source in tasks.BUILT_IN:
        train_items, held_items = tasks.BUILT_IN[source]()
        train, held_out = _task_rows(source, train_items), _task_rows(f"{source}/held-out", held_items)
    elif source.endswith(".jsonl"):
        train, held_out = None, ()
    else:
        raise ConfigError(
            "data.train", source, f"give a .jsonl file, reasoning_gym:NAME, or {', '.join(tasks.BUILT_IN)}"
        )
    summary = []
    if train is None:
        train, note = read_jsonl(source, config.prompt_column, config.answer_column, needs_answer)
        summary.append(note)
    else:
        summary.append(f"{source}: {len(train)} rows to train on, {len(held_out)} held out")
    if config.eval is not None:
        held_out, note = read_jsonl(config.eval, config.prompt_column, config.answer_column, needs_answer)
        summary.append(f"held out: {note}")
        known = {_identity(row) for row in train}
        both = sum(_identity(row) in known for row in held_out)
        if both:
            summary.append(f"held out: {both} of {len(held_out)} prompts are also trained on")
    train = tuple(_with_additions(row, config) for row in train)
    held_out = tuple(_with_additions(row, config) for row in held_out)
    return PromptSet(train, held_out, tuple(summary), scorer)


def _task_rows(name: str, items: Sequence[Mapping[str, Any]]) -> tuple[Row, ...]:
    return tuple(
        Row(f"{name}:{i}", ({"role": "user", "content": item["prompt"]},), {k: item[k] for k in item if k != "prompt"})
        for i, item in enumerate(items)
    )


def _identity(row: Row) -> str:
    return json.dumps(row.prompt, sort_keys=True)


def _with_additions(row: Row, config: DataConfig) -> Row:
    """The row with the recipe's system message and instruction."""
    messages = [dict(m) for m in row.prompt]
    if config.instruction is not None:
        last = max(i for i, m in enumerate(messages) if m["role"] == "user")
        messages[last]["content"] += f"\n\n{config.instruction}"
    if config.system is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": config.system})
    return dataclasses.replace(row, prompt=tuple(messages))


def keep_short(rows: Sequence[Row], num_tokens: Callable[[Row], int], limit: int) -> tuple[tuple[Row, ...], int]:
    """Rows whose prompt has at most `limit` tokens, and how many were left out.

    Raises:
        ConfigError: none is left.
    """
    kept = tuple(row for row in rows if num_tokens(row) <= limit)
    if rows and not kept:
        raise ConfigError("data.max_prompt_length", limit, f"raise it: all {len(rows)} prompts are longer")
    return kept, len(rows) - len(kept)


# ---------------------------------------------------------------------------------------------------- JSONL


def read_jsonl(
    path: str, prompt_column: str | None, answer_column: str | None, needs_answer: bool
) -> tuple[tuple[Row, ...], str]:
    """Rows of a JSON-lines file (UTF-8, a byte-order mark and CRLF allowed, blank lines ignored), and a summary line.

    Raises:
        ConfigError: names file, line and column.
    """
    file = pathlib.Path(path)
    if not file.is_file():
        raise ConfigError("data", path, "no such file")
    records = []
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ConfigError("data", path, f"not UTF-8 text: {error}") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            records.append((f"{path}:{number}", _parse(line, f"{path}:{number}")))
    if not records:
        raise ConfigError("data", path, "the file has 0 rows")
    where, first = records[0]
    verl = "data_source" in first and "reward_model" in first
    prompt = prompt_column or _recognise(first, PROMPT_COLUMNS)
    if prompt is None:
        raise ConfigError(where, sorted(first), f"no prompt column; name it one of {', '.join(PROMPT_COLUMNS)}")
    answer = answer_column or ("reward_model.ground_truth" if verl else _recognise(first, ANSWER_COLUMNS))
    if answer is None and needs_answer:
        raise ConfigError(where, sorted(first), f"no answer column; name it one of {', '.join(ANSWER_COLUMNS)}")
    rows = tuple(_read_row(name, record, prompt, answer, needs_answer, verl) for name, record in records)
    note = f"{path}: {len(rows)} rows, prompt from column `{prompt}`, answer from " + (
        f"column `{answer}`" if answer else "nowhere"
    )
    return rows, note


def _parse(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(where, line[:60], f"not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ConfigError(where, line[:60], "a row is a JSON object")
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ConfigError(where, line[:60], "it holds half of a surrogate pair, which is not a character") from None
    return record


def _recognise(record: Mapping[str, Any], names: Sequence[str]) -> str | None:
    return next((name for name in names if name in record), None)


def _read_row(where: str, record: dict, prompt: str, answer: str | None, needs_answer: bool, verl: bool) -> Row:
    place = f"{where} column {prompt}"
    if prompt not in record:
        raise ConfigError(place, None, "the row has no such column, other rows do")
    if verl and isinstance(record[prompt], str):
        raise ConfigError(place, record[prompt][:60], "in a verl-style file the prompt is a list of messages")
    messages = _messages(record[prompt], place)
    columns = {k: v for k, v in record.items() if k != prompt}
    if answer is not None:
        value: Any = record
        for part in answer.split(".") if verl else (answer,):
            value = value.get(part) if isinstance(value, dict) else None
        place = f"{where} column {answer}"
        blank = value is None or (isinstance(value, str) and not value.strip())
        if needs_answer and (blank or isinstance(value, bool) or not isinstance(value, str | int | float)):
            raise ConfigError(place, value, "the answer is missing; give a text or a number")
        columns.setdefault("answer", value)
    return Row(where, messages, columns)


def _messages(value: object, place: str) -> tuple[Message, ...]:
    """A prompt value as chat messages."""
    if isinstance(value, str):
        if not value.strip():
            raise ConfigError(place, value, "the prompt is empty")
        return ({"role": "user", "content": value},)
    if not isinstance(value, list) or not value:
        raise ConfigError(place, value, "a prompt is a text or a list of messages")
    messages = []
    for message in value:
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise ConfigError(place, message, "a message has exactly `role` and `content`")
        if message["role"] not in ROLES:
            raise ConfigError(place, message["role"], f"choose a role of {', '.join(ROLES)}")
        if not isinstance(message["content"], str) or (message["role"] == "user" and not message["content"].strip()):
            raise ConfigError(place, message["content"], "the content of a message is a text that is not empty")
        messages.append(dict(message))
    if all(m["role"] != "user" for m in messages):
        raise ConfigError(place, [m["role"] for m in messages], "there is no user message")
    if messages[-1]["role"] not in ("user", "tool"):
        raise ConfigError(place, messages[-1]["role"], "the last message must be the user's")
    return tuple(messages)


# ---------------------------------------------------------------------------------------------------- order


@dataclasses.dataclass(frozen=True)
class PromptOrder:
    """Which row stands at each position of the endless sequence of prompts.

    Epoch e is positions [e * num_rows, (e + 1) * num_rows). With `shuffle` its rows ascend by
    SHA-256(seed, epoch, row), else by row.
    """

    num_rows: int
    seed: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.num_rows < 1:
            raise ConfigError("data.train", self.num_rows, "there is no row to train on")

    def epoch(self, epoch: int) -> list[int]:
        """Row indices of one epoch, in order."""
        if not self.shuffle:
            return list(range(self.num_rows))
        return sorted(
            range(self.num_rows), key=lambda row: hashlib.sha256(f"{self.seed}/{epoch}/{row}".encode()).digest()
        )

    def take(self, position: int, count: int) -> list[int]:
        """Row indices at positions [position, position + count); may run over the end of an epoch."""
        taken: list[int] = []
        while len(taken) < count:
            epoch, offset = divmod(position + len(taken), self.num_rows)
            taken += self.epoch(epoch)[offset : offset + count - len(taken)]
        return taken
