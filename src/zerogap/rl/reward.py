"""Scoring completions with reward functions.

A reward function has TRL's signature: keyword arguments only (`prompts`, `completions`, `completion_ids`,
`trainer_state`, `log_extra`, `log_metric`, and every data column as a list), sync or async, returning one number or
None per completion. Only the arguments that a function names (or all, if it takes **kwargs) are passed, each time as
fresh copies, so no function can change what another one or the trainer sees. Anything but one finite number or None per
row is refused by name of function and row; exactly 0.0 is a reward; None leaves the row out of this function's score.

Functions of a recipe run in processes of their own with a time limit (`reward_process`), unless it sets none. What
becomes of a fault is the recipe's choice: it ends the run, or the function has no say in the completions it concerns.
"""

import asyncio
import concurrent.futures
import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zerogap.config import RewardConfig, RewardEntry
from zerogap.errors import ConfigError
from zerogap.rl.data_rows import Row
from zerogap.rl.reward_builtin import reference_number
from zerogap.rl.reward_loading import VERL, FunctionSpec, load_function
from zerogap.rl.reward_process import IsolatedFunction, call_all
from zerogap.rl.reward_values import (
    SUPPLIED,
    Hooks,
    Outcome,
    Parameter,
    RewardError,
    TrainerState,
    call,
    checked,
    parameters_of,
    raised,
)
from zerogap.rl.tasks import GymTask

FAILING_STEPS = 3  # batches in a row in which a function fails for every completion end a run whose faults are let pass


@dataclasses.dataclass(frozen=True, eq=False)
class RewardScores:
    """Scores of N completions.

    Attributes:
        totals: weighted sum per completion over the functions that gave a number; None where none did.
        columns: [functions][N] as returned.
        extra: columns given to `log_extra`, for the completions file.
        metrics: means of the values given to `log_metric`.
        errors, timeouts: scores that are missing because a function failed, or was too slow.
        notes: what failed, in words.
        output: what functions printed, where it was captured.
    """

    totals: list[float | None]
    columns: list[list[float | None]]
    extra: dict[str, list]
    metrics: dict[str, float]
    errors: int = 0
    timeouts: int = 0
    notes: tuple[str, ...] = ()
    output: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class RewardFunctions:
    """The reward functions of a run with their weights.

    Attributes:
        names: unique, as metrics show them.
        functions: callables with TRL's signature, called here, or functions in processes of their own.
        weights: one factor each.
        entries: what the recipe says of each; empty: nothing.
        abort: a fault ends the run.
    """

    names: tuple[str, ...]
    functions: tuple[Callable[..., Any] | IsolatedFunction, ...]
    weights: tuple[float, ...]
    entries: tuple[RewardEntry, ...] = ()
    abort: bool = True
    _failing: dict[str, int] = dataclasses.field(default_factory=dict)  # batches in a row without any score; mutated

    def check(self, columns: Sequence[str]) -> None:
        """Raise `ConfigError` if a function requires an argument that is neither supplied nor a data column."""
        for i, (name, function) in enumerate(zip(self.names, self.functions, strict=True)):
            given = self.entries[i].arguments if self.entries else {}
            for parameter in _parameters(function):
                known = parameter.name in (*SUPPLIED, *columns, *given)
                if parameter.nameless or (parameter.required and not known):
                    raise ConfigError(
                        f"reward function {name}",
                        parameter.name,
                        f"it needs an argument that is not there; there are {', '.join((*SUPPLIED, *columns))}",
                    )
            if both := [key for key in given if key in (*SUPPLIED, *columns)]:
                mend = "choose another name for the argument: a column, or what every function is given, is called so"
                raise ConfigError(f"reward function {name}", both[0], mend)

    def check_rows(self, rows: Sequence[Row]) -> None:
        """Raise `ConfigError` for the first row whose answer a built-in function or one of verl's cannot use."""
        for entry in self.entries:
            for row in rows:
                if not entry.scores(row.source):
                    continue
                answer = row.columns.get("answer")
                if entry.function == "number_match" and reference_number(answer) is None:
                    mend = (
                        "number_match needs a number in the answer; reward.functions can name the data sets it scores"
                    )
                    raise ConfigError(f"{row.name} answer", answer, mend)
                if entry.function.startswith(VERL) and answer is None:
                    mend = "verl's functions need a ground truth: reward_model.ground_truth, or an answer column"
                    raise ConfigError(f"{row.name} answer", answer, mend)

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
            RewardError: names the function and the row of a result that is not a number or None, of a call that raised
                or took too long. Where faults are let pass: a function failed for everything, several times in a row.
        """
        assert len(rows) == len(texts) == len(completion_ids), "one row and one text per completion"
        names = dict.fromkeys(key for row in rows for key in row.columns)
        arguments: dict[str, Any] = {
            "prompts": [list(row.prompt) for row in rows],
            "completions": [[{"role": "assistant", "content": text}] for text in texts],
            "completion_ids": [[int(i) for i in ids] for ids in completion_ids],
            **{key: [row.columns.get(key) for row in rows] for key in names if key not in SUPPLIED},
            "trainer_state": TrainerState(step),
        }
        chosen = [self._rows_of(i, rows) for i in range(len(self.functions))]
        outcomes = self._call_all(arguments, [row.name for row in rows], chosen)
        self._require_health(outcomes)
        full = [_spread(outcome, which, len(rows)) for outcome, which in zip(outcomes, chosen, strict=True)]
        columns = [outcome.scores for outcome in full]
        totals = [self._total([column[i] for column in columns]) for i in range(len(rows))]
        logged: dict[str, list[float]] = {}
        for outcome in full:
            for name, values in outcome.metrics.items():
                logged.setdefault(name, []).extend(values)
        return RewardScores(
            totals,
            columns,
            {column: values for outcome in full for column, values in outcome.extra.items()},
            {name: math.fsum(values) / len(values) for name, values in logged.items()},
            sum(outcome.errors for outcome in full),
            sum(outcome.timeouts for outcome in full),
            tuple(str(fault) for outcome in full for fault in outcome.faults),
            "".join(f"--- {n}\n{o.output}\n" for n, o in zip(self.names, full, strict=True) if o.output),
        )

    def close(self) -> None:
        """End the processes of functions; the next call begins new ones."""
        for function in self.functions:
            if isinstance(function, IsolatedFunction):
                function.close()

    def _rows_of(self, function: int, rows: Sequence[Row]) -> list[int]:
        """Indices of the rows that a function scores."""
        entry = self.entries[function] if self.entries else None
        return [i for i, row in enumerate(rows) if entry is None or entry.scores(row.source)]

    def _total(self, scores: Sequence[float | None]) -> float | None:
        given = [w * s for w, s in zip(self.weights, scores, strict=True) if s is not None]
        return math.fsum(given) if given else None

    def _require_health(self, outcomes: Sequence[Outcome]) -> None:
        """What has been let pass too often ends the run."""
        for name, outcome in zip(self.names, outcomes, strict=True):
            if not outcome.scores:
                continue
            failed = outcome.faults and outcome.errors + outcome.timeouts >= len(outcome.scores)
            self._failing[name] = self._failing.get(name, 0) + 1 if failed else 0
            if self._failing[name] >= FAILING_STEPS:
                first = outcome.faults[0]
                mend = f"{first.mend} (it failed for every completion {FAILING_STEPS} times in a row)"
                raise RewardError(first.key, first.value, mend, timed_out=first.timed_out, output=first.output)

    def _call_all(
        self, arguments: Mapping[str, Any], places: Sequence[str], chosen: Sequence[Sequence[int]]
    ) -> list[Outcome]:
        """Outcomes in the order of functions. Those of this process are called first, then the others side by side."""

        def part(which: Sequence[int]) -> tuple[dict[str, Any], list[str]]:
            lists = {k: [v[i] for i in which] if isinstance(v, list) else v for k, v in arguments.items()}
            return lists, [places[i] for i in which]

        outcomes: dict[int, Outcome] = dict.fromkeys(range(len(self.functions)), Outcome([]))
        here, there = {}, {}
        for i, function in enumerate(self.functions):
            if chosen[i] and isinstance(function, IsolatedFunction):
                there[i] = (function, *part(chosen[i]))
            elif chosen[i] and not isinstance(function, IsolatedFunction):
                here[i] = (self.names[i], function, *part(chosen[i]))
        outcomes |= zip(here, call_here(list(here.values()), self.abort), strict=True)
        outcomes |= zip(there, call_all(list(there.values()), self.abort), strict=True)
        return [outcomes[i] for i in range(len(self.functions))]


def _parameters(function: Callable[..., Any] | IsolatedFunction) -> tuple[Parameter, ...]:
    return function.parameters if isinstance(function, IsolatedFunction) else parameters_of(function)


def _spread(outcome: Outcome, which: Sequence[int], count: int) -> Outcome:
    """An outcome for some rows as one for all: None for the others."""
    if len(which) == count:
        return outcome
    scores: list[float | None] = [None] * count
    extra = {column: [None] * count for column, values in outcome.extra.items() if len(values) == len(which)}
    for k, i in enumerate(which):
        scores[i] = outcome.scores[k]
        for column in extra:
            extra[column][i] = outcome.extra[column][k]
    return dataclasses.replace(outcome, scores=scores, extra=extra)


def call_here(
    calls: Sequence[tuple[str, Callable[..., Any], Mapping[str, Any], Sequence[str]]], stop_at_fault: bool
) -> list[Outcome]:
    """Call functions in this process, in order; async ones run concurrently after the others were called.

    Args:
        calls: name, function, arguments, and where each row stands.

    Raises:
        RewardError: the first fault, with `stop_at_fault`.
    """
    results: list[Any] = []
    hooks = [Hooks() for _ in calls]
    for i, (name, function, arguments, _) in enumerate(calls):
        try:
            results.append(call(function, arguments, hooks[i]))
        except Exception as error:
            failed = raised(name, error)
            if stop_at_fault:
                raise failed from error
            results.append(failed)
    waiting = [i for i, result in enumerate(results) if inspect.isawaitable(result)]
    if waiting:
        # A thread of its own, because the caller's may already run an event loop (a notebook's does).
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            answers = pool.submit(asyncio.run, _gather([results[i] for i in waiting])).result()
        for i, answer in zip(waiting, answers, strict=True):
            results[i] = answer
    outcomes = []
    for i, (name, _, _, rows) in enumerate(calls):
        outcome = _outcome(name, results[i], rows, hooks[i])
        if outcome.faults and stop_at_fault:
            raise outcome.faults[0] from results[i] if isinstance(results[i], Exception) else None
        outcomes.append(outcome)
    return outcomes


def _outcome(name: str, result: Any, rows: Sequence[str], hooks: Hooks) -> Outcome:
    """A result, or the exception there was instead, as an outcome."""
    if isinstance(result, Exception):
        failed = result if isinstance(result, RewardError) else raised(name, result)
        return Outcome([None] * len(rows), errors=len(rows), faults=(failed,))
    try:
        scores, errors = checked(name, result, rows)
    except RewardError as error:
        return Outcome([None] * len(rows), errors=len(rows), faults=(error,))
    return Outcome(scores, hooks.extra, hooks.metrics, len(errors), faults=tuple(errors))


async def _gather(awaitables: Sequence[Any]) -> list[Any]:
    return await asyncio.gather(*awaitables, return_exceptions=True)


# ---------------------------------------------------------------------------------------------------- loading


def load_rewards(config: RewardConfig, tasks: Mapping[str, GymTask] | None = None) -> RewardFunctions:
    """The reward functions that a recipe asks for, ready to be called.

    Args:
        config: the recipe's section.
        tasks: what `task` scores, by the value of the column `task`.

    Raises:
        ConfigError: a function that cannot be found, called, or named apart from another.
    """
    entries = config.entries()
    specs = [FunctionSpec(entry.function, dict(entry.arguments), "", tasks or {}) for entry in entries]
    short = [entry.name or spec.short_name for entry, spec in zip(entries, specs, strict=True)]
    names = [n if short.count(n) == 1 else s.path.replace("/", ".") for n, s in zip(short, specs, strict=True)]
    if len(set(names)) != len(names):
        mend = "name every function once, or give them names: {function: ..., name: ...}"
        raise ConfigError("reward.functions", list(config.functions), mend)
    functions: list[Callable[..., Any] | IsolatedFunction] = []
    for name, spec in zip(names, specs, strict=True):
        if spec.path == "task" and not tasks:
            raise ConfigError("reward.functions", "task", "only reasoning_gym:NAME data has a scorer of its own")
        spec = dataclasses.replace(spec, name=name)
        if config.timeout is None or spec.harmless:
            functions.append(load_function(spec))
        else:
            functions.append(IsolatedFunction(spec, config.timeout))
    weights = config.weights or tuple(1.0 for _ in functions)
    return RewardFunctions(tuple(names), tuple(functions), tuple(weights), entries, config.on_error == "abort")
