"""Prompts: what a recipe's `data` section stands for, read and checked before a model is loaded.

A data set is a file, a folder, one of the hub (`data_files`), a task of reasoning-gym, or a built-in task; several are
mixed by weight (`data_order`). Values of a row reach reward functions unchanged, and stay with their row: rows are
named by index, never by their text. Every fault is named by file, row and column.
"""

import collections
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from zerogap.config import DataConfig, DataSource
from zerogap.errors import ConfigError
from zerogap.rl.data_files import KINDS, is_data_set, read_records
from zerogap.rl.data_order import MixedOrder, PromptOrder, prompt_order
from zerogap.rl.data_rows import Row, read_rows
from zerogap.rl.tasks import BUILT_IN, GymTask

Needs = Callable[[str], bool]


@dataclasses.dataclass(frozen=True, eq=False)
class PromptSet:
    """What a recipe's `data` section stands for.

    Attributes:
        train: rows to train on, data set by data set.
        held_out: rows to evaluate on, the data sets in turn. None of a task's held-out prompts is trained on. May be
            empty.
        summary: lines for people: which columns were recognised, how many rows there are, what was left out.
        weights: of the data sets in `train`.
        tasks: reasoning-gym tasks by the value of their rows' column `task`.
    """

    train: tuple[Row, ...]
    held_out: tuple[Row, ...]
    summary: tuple[str, ...]
    weights: tuple[float, ...] = (1.0,)
    tasks: Mapping[str, GymTask] = dataclasses.field(default_factory=dict)

    def order(self, rows: Sequence[Row], seed: int, shuffle: bool) -> PromptOrder | MixedOrder:
        """The order in which those rows of `train` that are left are trained.

        Raises:
            ConfigError: a data set has no row left.
        """
        return prompt_order([row.part for row in rows], self.weights, seed, shuffle)


def load_prompts(config: DataConfig, seed: int, needs_answer: Needs) -> PromptSet:
    """Load what `data` names.

    Args:
        config: the recipe's section.
        seed: of reasoning-gym problems. The built-in tasks are the same for every seed.
        needs_answer: whether a reward function needs the answers of a data set, by its path; then a row without one is
            refused.

    Raises:
        ConfigError: names file, row and column, or the key of the recipe.
    """
    sources = config.train_sources()
    keys = [f"data.train[{i}]" if len(sources) > 1 else "data.train" for i in range(len(sources))]
    if config.task and not any(source.gym_task for source in sources):
        raise ConfigError("data.task", config.task, "leave it out: no data set is a reasoning_gym:NAME")
    train: list[tuple[Row, ...]] = []
    held: list[tuple[Row, ...]] = []
    summary: list[str] = []
    gym_tasks: dict[str, GymTask] = {}
    for part, (source, key) in enumerate(zip(sources, keys, strict=True)):
        rows, held_out, lines, task = _load(source, key, part, seed, needs_answer(source.path))
        train.append(_with_additions(rows, source))
        held.append(_with_additions(held_out, source))
        summary += lines
        if task is not None:
            gym_tasks[_label(source, part)] = task
    if len(sources) > 1:
        total = sum(source.weight for source in sources)
        parts = ", ".join(f"{source.weight / total:.1%} {source.path}" for source in sources)
        summary.append(f"mixed by weight: {parts}")
    if config.eval is not None:
        held, lines = _load_held_out(config, seed, needs_answer)
        summary += lines
    together = tuple(itertools.chain(*train))
    held_out = _in_turn(held)
    if config.eval is None:
        together, note = _without(together, held_out)
        summary += note
    elif both := len(set(map(_identity, held_out)) & set(map(_identity, together))):
        summary.append(f"held out: {both} of {len(held_out)} prompts are also trained on")
    weights = tuple(source.weight for source in sources)
    return PromptSet(together, held_out, tuple(summary), weights, gym_tasks)


def _load(
    source: DataSource, key: str, part: int, seed: int, needs_answer: bool
) -> tuple[tuple[Row, ...], tuple[Row, ...], list[str], GymTask | None]:
    """(rows to train on, rows held out, summary, reasoning-gym task) of one data set."""
    path = source.path
    task = None
    if source.gym_task is not None:
        assert source.size is not None, "filled in from the section"
        task = GymTask(source.gym_task, source.size, seed, dict(source.task or {}))
        train, held = task.problems(key)
        items = [[{**item, "task": _label(source, part)} for item in some] for some in (train, held)]
    elif path in BUILT_IN:
        items = [list(some) for some in BUILT_IN[path]()]
    else:
        rows, lines = _read(source, key, part, "train", needs_answer)
        return rows, (), lines, None
    if source.split is not None:
        raise ConfigError(f"{key}.split", source.split, "leave it out: a task holds out its own problems")
    rows, held_out = _task_rows(path, path, part, items[0]), _task_rows(f"{path}/held-out", path, part, items[1])
    return rows, held_out, [f"{path}: {len(rows):,} rows to train on, {len(held_out):,} held out"], task


def _label(source: DataSource, part: int) -> str:
    """Name of a task among those of the recipe, which may hold one of them twice with other settings."""
    return f"{source.path}#{part}"


def _read(source: DataSource, key: str, part: int, split: str, needs_answer: bool) -> tuple[tuple[Row, ...], list[str]]:
    """Rows of a data set of files, and its summary."""
    if not is_data_set(source.path):
        raise ConfigError(key, source.path, f"give {KINDS}, reasoning_gym:NAME, or {', '.join(BUILT_IN)}")
    name, records = read_records(source, key, split)
    rows, notes = read_rows(records, source, part, needs_answer)
    return rows, [f"{name}: {notes[0]}", *(f"  {note}" for note in notes[1:])]


def _load_held_out(config: DataConfig, seed: int, needs_answer: Needs) -> tuple[list[tuple[Row, ...]], list[str]]:
    """Rows of what `data.eval` names."""
    held, summary = [], []
    sources = config.eval_sources()
    for part, source in enumerate(sources):
        key = f"data.eval[{part}]" if len(sources) > 1 else "data.eval"
        if source.gym_task is not None or source.path in BUILT_IN:
            raise ConfigError(key, source.path, f"a task is held out with data.train alone; give {KINDS}")
        rows, lines = _read(source, key, part, "test", needs_answer(source.path))
        held.append(_with_additions(rows, source))
        summary += [f"held out: {lines[0]}", *lines[1:]]
    return held, summary


def _task_rows(name: str, source: str, part: int, items: Iterable[Mapping[str, Any]]) -> tuple[Row, ...]:
    rows = []
    for i, item in enumerate(items):
        columns = {key: value for key, value in item.items() if key != "prompt"}
        rows.append(Row(f"{name}:{i}", ({"role": "user", "content": item["prompt"]},), columns, source, part))
    return tuple(rows)


def _in_turn(groups: Sequence[Sequence[Row]]) -> tuple[Row, ...]:
    """The first row of each group, then the second of each, ..."""
    return tuple(row for rows in itertools.zip_longest(*groups) for row in rows if row is not None)


def _identity(row: Row) -> str:
    return json.dumps(row.prompt, sort_keys=True)


def _without(train: tuple[Row, ...], held_out: Sequence[Row]) -> tuple[tuple[Row, ...], list[str]]:
    """The rows whose prompt is not held out by a task of another data set."""
    known = set(map(_identity, held_out))
    kept = tuple(row for row in train if _identity(row) not in known)
    lost = len(train) - len(kept)
    return kept, [f"{lost} rows to train on are held out by another data set, and left out"] if lost else []


def _with_additions(rows: Sequence[Row], source: DataSource) -> tuple[Row, ...]:
    """Rows with the recipe's system message and instruction."""
    if source.instruction is None and source.system is None:
        return tuple(rows)
    changed = []
    for row in rows:
        messages = [dict(m) for m in row.prompt]
        if source.instruction is not None:
            last = max(i for i, m in enumerate(messages) if m["role"] == "user")
            messages[last]["content"] += f"\n\n{source.instruction}"
        if source.system is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": source.system})
        changed.append(dataclasses.replace(row, prompt=tuple(messages)))
    return tuple(changed)


# ---------------------------------------------------------------------------------------------------- lengths


def keep_short(rows: Sequence[Row], num_tokens: Callable[[Row], int], limit: int) -> tuple[tuple[Row, ...], int]:
    """Rows whose prompt has at most `limit` tokens, and how many were left out.

    Raises:
        ConfigError: none is left, of a data set or at all.
    """
    kept = tuple(row for row in rows if num_tokens(row) <= limit)
    before, after = (collections.Counter((row.part, row.source) for row in some) for some in (rows, kept))
    for part, source in before:
        if not after[part, source]:
            of = f" of {source}" if len(before) > 1 else ""
            mend = f"raise it: all {before[part, source]} prompts{of} are longer"
            raise ConfigError("data.max_prompt_length", limit, mend)
    return kept, len(rows) - len(kept)


def length_notes(lengths: Sequence[int], limit: int, what: str = "prompts") -> list[str]:
    """What is told of prompts' lengths in tokens: quantiles, and how many are longer than the limit.

    A quantile q is the smallest length that at least the share q of prompts does not exceed.
    """
    if not lengths:
        return []
    ascending = sorted(lengths)
    shown = {q: ascending[max(0, -(-q * len(ascending) // 100) - 1)] for q in (0, 50, 90, 99, 100)}
    text = f"tokens of {what}: {shown[0]} to {shown[100]}, half up to {shown[50]}, 90 % {shown[90]}, 99 % {shown[99]}"
    longer = sum(length > limit for length in lengths)
    more = [f"{longer} {what} are longer than {limit} tokens and left out"] if longer else []
    return [text, *more]
