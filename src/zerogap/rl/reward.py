"""Scoring completions with the user's functions.

A reward function has TRL's signature: keyword arguments only (`prompts`, `completions`, `completion_ids`,
`trainer_state`, `log_extra`, `log_metric`, and every data column as a list), sync or async, returning one number or
None per completion. Only the arguments that a function names (or all, if it takes **kwargs) are passed, each time as
fresh copies, so no function can change what another one or the trainer sees. Anything but one finite number or None per
row is refused by name of function and row; exactly 0.0 is a reward; None leaves the row out of this function's score.
"""

import asyncio
import concurrent.futures
import copy
import dataclasses
import importlib
import importlib.util
import inspect
import math
import numbers
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from zerogap.errors import ConfigError
from zerogap.rl.data import Row

SUPPLIED = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")

_NUMBER = re.compile(r"(?<![0-9])-?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)?(?:\.[0-9]+)?")


@dataclasses.dataclass(frozen=True)
class TrainerState:
    """What a reward function may ask about the run."""

    global_step: int


@dataclasses.dataclass(frozen=True, eq=False)
class RewardScores:
    """Scores of N completions.

    Attributes:
        totals: weighted sum per completion over the functions that gave a number; None where none did.
        columns: [functions][N] as returned.
        extra: columns given to `log_extra`, for the completions file.
        metrics: means of the values given to `log_metric`.
    """

    totals: list[float | None]
    columns: list[list[float | None]]
    extra: dict[str, list]
    metrics: dict[str, float]


@dataclasses.dataclass(frozen=True, eq=False)
class RewardFunctions:
    """The reward functions of a run with their weights.

    Attributes:
        names: unique, as metrics show them.
        functions: callables with TRL's signature.
        weights: one factor each.
    """

    names: tuple[str, ...]
    functions: tuple[Callable[..., Any], ...]
    weights: tuple[float, ...]

    def check(self, columns: Sequence[str]) -> None:
        """Raise `ConfigError` if a function requires an argument that is neither supplied nor a data column."""
        for name, function in zip(self.names, self.functions, strict=True):
            for parameter in inspect.signature(function).parameters.values():
                required = parameter.default is parameter.empty and parameter.kind in (
                    parameter.POSITIONAL_OR_KEYWORD,
                    parameter.KEYWORD_ONLY,
                )
                if parameter.kind is parameter.POSITIONAL_ONLY or (
                    required and parameter.name not in (*SUPPLIED, *columns)
                ):
                    raise ConfigError(
                        f"reward function {name}",
                        parameter.name,
                        f"it needs an argument that is not there; there are {', '.join((*SUPPLIED, *columns))}",
                    )

    def score(
        self, rows: Sequence[Row], texts: Sequence[str], completion_ids: Sequence[Sequence[int]], step: int
    ) -> RewardScores:
        """Score N completions.

        Args:
            rows: the data row of each completion (the same row for the members of a group).
            texts: decoded completions.
            completion_ids: their token ids.
            step: the run's step, as `trainer_state.global_step`.

        Raises:
            ConfigError: names the function and the row of a result that is not a number or None.
        """
        assert len(rows) == len(texts) == len(completion_ids), "one row and one text per completion"
        names = dict.fromkeys(key for row in rows for key in row.columns)
        arguments: dict[str, Any] = {
            "prompts": [list(row.prompt) for row in rows],
            "completions": [[{"role": "assistant", "content": text}] for text in texts],
            "completion_ids": [[int(i) for i in ids] for ids in completion_ids],
            **{key: [row.columns.get(key) for row in rows] for key in names if key not in SUPPLIED},
        }
        extra: dict[str, list] = {}
        logged: dict[str, list[float]] = {}
        hooks = {
            "trainer_state": TrainerState(step),
            "log_extra": lambda column, values: extra.__setitem__(column, list(values)),
            "log_metric": lambda name, value: logged.setdefault(name, []).append(float(value)),
        }
        results = self._call_all(arguments, hooks)
        columns = [_checked(name, result, rows) for name, result in zip(self.names, results, strict=True)]
        totals = [self._total([column[i] for column in columns]) for i in range(len(rows))]
        return RewardScores(totals, columns, extra, {k: math.fsum(v) / len(v) for k, v in logged.items()})

    def _total(self, scores: Sequence[float | None]) -> float | None:
        given = [w * s for w, s in zip(self.weights, scores, strict=True) if s is not None]
        return math.fsum(given) if given else None

    def _call_all(self, arguments: Mapping[str, Any], hooks: Mapping[str, Any]) -> list[Any]:
        """Results in the order of functions; async ones run concurrently after the others were called."""
        results = []
        for name, function in zip(self.names, self.functions, strict=True):
            supplied = {**copy.deepcopy(dict(arguments)), **hooks}
            parameters = inspect.signature(function).parameters.values()
            if not any(p.kind is p.VAR_KEYWORD for p in parameters):
                accepted = {p.name for p in parameters}
                supplied = {k: v for k, v in supplied.items() if k in accepted}
            try:
                results.append(function(**supplied))
            except Exception as error:
                raise _failed(name, error) from error
        waiting = [i for i, result in enumerate(results) if inspect.isawaitable(result)]
        if waiting:
            # A thread of its own, because the caller's may already run an event loop (a notebook's does).
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                answers = pool.submit(asyncio.run, _gather([results[i] for i in waiting])).result()
            for i, answer in zip(waiting, answers, strict=True):
                if isinstance(answer, Exception):
                    raise _failed(self.names[i], answer) from answer
                results[i] = answer
        return results


async def _gather(awaitables: Sequence[Any]) -> list[Any]:
    return await asyncio.gather(*awaitables, return_exceptions=True)


def _failed(name: str, error: Exception) -> ConfigError:
    return ConfigError(f"reward function {name}", f"{type(error).__name__}: {error}", "it raised; mend the function")


def _checked(name: str, result: object, rows: Sequence[Row]) -> list[float | None]:
    """A function's result as one float or None per row; everything else is refused."""
    key = f"reward function {name}"
    if not isinstance(result, list | tuple):
        hint = "; convert it with .tolist()" if hasattr(result, "tolist") else ""
        raise ConfigError(key, type(result).__name__, f"return a list with one number or None per completion{hint}")
    if len(result) != len(rows):
        raise ConfigError(key, f"{len(result)} values", f"return {len(rows)}, one per completion")
    scores: list[float | None] = []
    for i, value in enumerate(result):
        place = f"{key}, completion {i} ({rows[i].name})"
        if value is None:
            scores.append(None)
            continue
        if not isinstance(value, numbers.Real | np.bool_):
            raise ConfigError(place, value, f"return a number or None, not {type(value).__name__}")
        if not math.isfinite(value):
            raise ConfigError(place, float(value), "return a finite number, or None to leave the completion out")
        scores.append(float(value))
    return scores


# ---------------------------------------------------------------------------------------------------- loading


def load_rewards(
    functions: Sequence[str], weights: Sequence[float] | None, scorer: Callable[[str, Row], float] | None = None
) -> RewardFunctions:
    """Reward functions by name.

    Args:
        functions: `number_match`, `task`, `module:function` or `path/to/file.py:function`.
        weights: one per function, or None for all 1.
        scorer: what `task` stands for: (completion text, row) -> reward; wrapped by the caller's `PromptSet`.

    Raises:
        ConfigError: a function that cannot be found, called, or named apart from another.
    """
    loaded, names = [], []
    for path in functions:
        if path == "number_match":
            function: Callable[..., Any] = number_match
        elif path == "task":
            if scorer is None:
                raise ConfigError("reward.functions", path, "only reasoning_gym:NAME data has a scorer of its own")
            function = _task_reward(scorer)
        else:
            function = _import_function(path)
        loaded.append(function)
        names.append(path.rpartition(":")[2])
    unique = [name if names.count(name) == 1 else path for name, path in zip(names, functions, strict=True)]
    if len(set(unique)) != len(unique):
        raise ConfigError("reward.functions", list(functions), "name every function once")
    return RewardFunctions(tuple(unique), tuple(loaded), tuple(weights or [1.0] * len(loaded)))


def _task_reward(scorer: Callable[[str, Row], float]) -> Callable[..., list[float]]:
    def task(completions: list, entry: list) -> list[float]:
        rows = [Row("", (), {"entry": e}) for e in entry]
        return [scorer(c[0]["content"], row) for c, row in zip(completions, rows, strict=True)]

    return task


def _import_function(path: str) -> Callable[..., Any]:
    module_name, colon, name = path.rpartition(":")
    if not colon or not module_name or not name:
        raise ConfigError("reward.functions", path, "write module:function or path/to/file.py:function")
    if module_name.endswith(".py"):
        file = pathlib.Path(module_name)
        if not file.is_file():
            raise ConfigError("reward.functions", path, f"no such file: {file}")
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None and spec.loader is not None, f"{file} is a Python file"
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            raise ConfigError("reward.functions", path, f"{error}; a file is named path/to/file.py:function") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError("reward.functions", path, f"{module_name} has no function {name}")
    return function


# ---------------------------------------------------------------------------------------------------- numbers


def last_number(text: str) -> Fraction | None:
    """The last number in a text, exactly: `1,234.50`, `-3`, `.5`; a minus right after a digit is an operator."""
    found = [m.group() for m in _NUMBER.finditer(text.replace("\N{MINUS SIGN}", "-")) if m.group().strip("-")]
    return Fraction(found[-1].replace(",", "")) if found else None


def reference_number(answer: object) -> Fraction | None:
    """The number that an answer column states: a number, or a text's last one (GSM8K: the one after `####`)."""
    if isinstance(answer, int | float) and not isinstance(answer, bool) and math.isfinite(answer):
        return Fraction(repr(answer))
    return last_number(answer.rpartition("####")[2]) if isinstance(answer, str) else None


def number_match(completions: list, answer: list) -> list[float]:
    """1.0 where the last number of a completion equals the answer's, else 0.0."""
    scores = []
    for completion, expected in zip(completions, answer, strict=True):
        number = reference_number(expected)
        if number is None:
            raise ConfigError("answer", expected, "number_match needs a number in the answer")
        scores.append(float(last_number(completion[0]["content"]) == number))
    return scores
