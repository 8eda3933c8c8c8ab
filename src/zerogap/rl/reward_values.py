"""What goes into a reward function and what may come out: TRL's signature, and its results as checked numbers.

Used on both sides of a process border (`reward_process`, `reward_worker`), so it imports next to nothing: a function's
process begins in an instant.
"""

import copy
import dataclasses
import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zerogap.errors import ConfigError

SUPPLIED = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
Scores = list[float | None]


@dataclasses.dataclass(frozen=True)
class TrainerState:
    """What a reward function may ask about the run."""

    global_step: int


class RewardError(ConfigError):
    """A reward function raised, took too long, or returned something that is no reward; the step did not train.

    Attributes:
        timed_out: it took too long.
        output: what it had printed.
    """

    def __init__(self, key: str, value: object, mend: str, *, timed_out: bool = False, output: str = "") -> None:
        super().__init__(key, value, mend)
        self.timed_out, self.output = timed_out, output


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One argument of a reward function: its name, `required` if it has no default, `nameless` if positional only,
    `rest` for **kwargs."""

    name: str
    required: bool
    nameless: bool
    rest: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Outcome:
    """What one call gave.

    Attributes:
        scores: one per completion.
        extra: columns given to `log_extra`.
        metrics: values given to `log_metric`.
        errors, timeouts: completions that have no score because the call failed, or was not done in time.
        faults: why.
        output: what was printed, where it was captured.
    """

    scores: Scores
    extra: dict[str, list] = dataclasses.field(default_factory=dict)
    metrics: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    errors: int = 0
    timeouts: int = 0
    faults: tuple[RewardError, ...] = ()
    output: str = ""


class Hooks:
    """The functions that a reward function may log with, and what was logged. Mutated by the function's calls."""

    def __init__(self) -> None:
        self.extra: dict[str, list] = {}
        self.metrics: dict[str, list[float]] = {}

    def supplied(self) -> dict[str, Callable[..., None]]:
        """`log_extra(column, values)` and `log_metric(name, value)`."""
        return {"log_extra": self._log_extra, "log_metric": self._log_metric}

    def _log_extra(self, column: str, values: Sequence[Any]) -> None:
        self.extra[column] = list(values)

    def _log_metric(self, name: str, value: float) -> None:
        self.metrics.setdefault(name, []).append(float(value))


def parameters_of(function: Callable[..., Any]) -> tuple[Parameter, ...]:
    """A function's arguments."""
    found = []
    for p in inspect.signature(function).parameters.values():
        required = p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        if p.kind is not p.VAR_POSITIONAL:
            found.append(Parameter(p.name, required, p.kind is p.POSITIONAL_ONLY, p.kind is p.VAR_KEYWORD))
    return tuple(found)


def accepted(arguments: Mapping[str, Any], parameters: Sequence[Parameter]) -> dict[str, Any]:
    """The arguments that a function names, or all if it takes **kwargs."""
    if any(p.rest for p in parameters):
        return dict(arguments)
    names = {p.name for p in parameters}
    return {key: value for key, value in arguments.items() if key in names}


def call(function: Callable[..., Any], arguments: Mapping[str, Any], hooks: Hooks) -> Any:
    """The function's result, or its awaitable, from fresh copies of the arguments it takes."""
    chosen = accepted({**arguments, **hooks.supplied()}, parameters_of(function))
    logging = {key: chosen.pop(key) for key in hooks.supplied() if key in chosen}
    return function(**copy.deepcopy(chosen), **logging)


def raised(name: str, error: Exception) -> RewardError:
    """The error of a function that raised one: what it was and where in the function's own file."""
    if isinstance(error, ConfigError):
        return RewardError(error.key, error.value, error.mend)
    place, traceback = "", error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        place, traceback = f" ({code.co_filename}:{traceback.tb_lineno})", traceback.tb_next
    return RewardError(
        f"reward function {name}", f"{type(error).__name__}: {error}", f"it raised{place}; mend the function"
    )


def _is_number(value: object) -> bool:
    kind = type(value)
    return isinstance(value, numbers.Real) or (kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_"))


def checked(name: str, result: object, rows: Sequence[str]) -> tuple[Scores, list[RewardError]]:
    """A function's result as one float or None per row, and the errors of single values, whose scores are None.

    Args:
        rows: where each completion's row stands, for messages.

    Raises:
        RewardError: the result as a whole is not one value per row.
    """
    key = f"reward function {name}"
    if not isinstance(result, list | tuple):
        hint = "; convert it with .tolist()" if hasattr(result, "tolist") else ""
        raise RewardError(key, type(result).__name__, f"return a list with one number or None per completion{hint}")
    if len(result) != len(rows):
        raise RewardError(key, f"{len(result)} values", f"return {len(rows)}, one per completion")
    scores: Scores = []
    errors = []
    for i, value in enumerate(result):
        place = f"{key}, completion {i} ({rows[i]})"
        if value is not None and not _is_number(value):
            shown = value if isinstance(value, str | int | float | list) else repr(value)[:60]
            errors.append(RewardError(place, shown, f"return a number or None, not {type(value).__name__}"))
        elif value is not None and not math.isfinite(value):
            mend = "return a finite number, or None to leave the completion out"
            errors.append(RewardError(place, float(value), mend))
        else:
            scores.append(None if value is None else float(value))
            continue
        scores.append(None)
    return scores, errors
