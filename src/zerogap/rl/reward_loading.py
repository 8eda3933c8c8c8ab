"""From the names in a recipe to callables with TRL's signature, in whichever process they are to run.

number_match, math_verify, format, length, task      built in (`reward_builtin`)
module:function, path/to/file.py:function            the user's, with TRL's signature
verl:module:function, verl:path/to/file.py:function  the user's, with the signature of verl's `compute_score`
"""

import dataclasses
import functools
import importlib
import importlib.util
import inspect
import numbers
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zerogap.errors import ConfigError
from zerogap.rl.reward_builtin import format_reward, length_reward, math_verify, number_match, task_reward
from zerogap.rl.tasks import GymTask

VERL = "verl:"
VERL_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
VERL_COLUMNS = ("data_source", "reward_model", "extra_info", "answer")
CPU_SECONDS = 10.0  # of processor time that math_verify and the scorers of tasks may take over one completion


@dataclasses.dataclass(frozen=True)
class FunctionSpec:
    """A reward function to be loaded; can be sent to another process.

    Attributes:
        path: as the recipe names it.
        arguments: further keyword arguments.
        name: in metrics.
        tasks: what `task` scores.
        cpu_seconds: of processor time over one completion, after which a library behind a built-in is given up.
    """

    path: str
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    name: str = ""
    tasks: Mapping[str, GymTask] = dataclasses.field(default_factory=dict)
    cpu_seconds: float = CPU_SECONDS

    @property
    def short_name(self) -> str:
        """The function's own name."""
        return self.path.rpartition(":")[2]

    @property
    def harmless(self) -> bool:
        """It is built in and takes no time, whatever the completion is."""
        return self.path in ("number_match", "length") or (self.path == "format" and "pattern" not in self.arguments)

    @property
    def row_by_row(self) -> bool:
        """Completions are scored one by one, so that a fault costs one of them; async functions score all at once."""
        return self.path in ("math_verify", "task", "format") or self.path.startswith(VERL)

    @property
    def fails_with(self) -> float | None:
        """The score of a completion on which a library behind a built-in hangs or breaks; None: it is a fault.

        Such a completion (`10^{10^{10}}`) is the model's doing, and no right answer.
        """
        return 0.0 if self.path in ("math_verify", "task") else None

    @property
    def needs_answer(self) -> bool:
        """It reads the column `answer`, which must be a text or a number."""
        return self.path in ("number_match", "math_verify")


def load_function(spec: FunctionSpec) -> Callable[..., Any]:
    """The callable, with TRL's signature.

    Raises:
        ConfigError: it cannot be found or called, or does not take the arguments.
    """
    makers: dict[str, Callable[..., Callable[..., Any]]] = {
        "number_match": lambda: number_match,
        "math_verify": math_verify,
        "format": format_reward,
        "length": length_reward,
        "task": functools.partial(task_reward, spec.tasks),
    }
    if spec.path in makers:
        return _applied(makers[spec.path], spec)()
    if spec.path.startswith(VERL):
        return _verl(import_function(spec.path, spec.path.removeprefix(VERL)), spec)
    return _applied(import_function(spec.path, spec.path), spec)


def _applied(function: Callable[..., Any], spec: FunctionSpec) -> Callable[..., Any]:
    """The function with the recipe's arguments."""
    if not spec.arguments:
        return function
    try:
        inspect.signature(function).bind_partial(**spec.arguments)
    except TypeError as error:
        raise ConfigError("reward.functions", f"{spec.path} with {dict(spec.arguments)}", str(error)) from None
    return functools.partial(function, **spec.arguments)


def import_function(path: str, place: str) -> Callable[..., Any]:
    """The function at `module:function` or `path/to/file.py:function`; `path` is what messages name.

    Raises:
        ConfigError: there is none.
    """
    module_name, colon, name = place.rpartition(":")
    if not colon or not module_name or not name:
        raise ConfigError("reward.functions", path, "write module:function or path/to/file.py:function")
    if module_name.endswith(".py"):
        file = Path(module_name).expanduser()
        if not file.is_file():
            raise ConfigError("reward.functions", path, f"no such file: {file}")
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None and spec.loader is not None, f"{file} is a Python file"
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            mend = f"loading {file} raised {type(error).__name__}: {error}"
            raise ConfigError("reward.functions", path, mend) from error
    else:
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            raise ConfigError("reward.functions", path, f"{error}; a file is named path/to/file.py:function") from error
        except Exception as error:
            mend = f"importing {module_name} raised {type(error).__name__}: {error}"
            raise ConfigError("reward.functions", path, mend) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError("reward.functions", path, f"{module_name} has no function {name}")
    return function


# ---------------------------------------------------------------------------------------------------- verl


def _verl(function: Callable[..., Any], spec: FunctionSpec) -> Callable[..., Any]:
    """verl's `compute_score(data_source, solution_str, ground_truth, extra_info)` as a reward of TRL's signature.

    As in verl 0.9.1 (`NaiveRewardManager`): the ground truth is `reward_model.ground_truth` of the row, the result a
    number or a mapping with `score`. Entries beside it become columns of the completions file and, if they are
    numbers, metrics `rewards/NAME/KEY`. A row that is not verl's has its `answer` as ground truth.
    """
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name, parameter in parameters.items():
        required = parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        )
        if required and name not in (*VERL_ARGUMENTS, *spec.arguments):
            mend = f"verl's functions are given {', '.join(VERL_ARGUMENTS)}, and what the recipe adds"
            raise ConfigError(f"reward function {spec.short_name}", name, mend)
    if unknown := [] if takes_all else [key for key in spec.arguments if key not in parameters]:
        raise ConfigError("reward.functions", f"{spec.path} with {unknown[0]}", "it takes no such argument")

    def given(text: str, columns: Mapping[str, list], i: int) -> dict[str, Any]:
        row = {key: columns[key][i] for key in VERL_COLUMNS if key in columns}
        model = row.get("reward_model")
        truth = model.get("ground_truth") if isinstance(model, dict) else row.get("answer")
        arguments = {
            "data_source": row.get("data_source"),
            "solution_str": text,
            "ground_truth": truth,
            "extra_info": dict(row.get("extra_info") or {}),
            **spec.arguments,
        }
        return arguments if takes_all else {key: value for key, value in arguments.items() if key in parameters}

    def note(results: list[Any], log_extra: Callable[..., None], log_metric: Callable[..., None]) -> list[Any]:
        keys = dict.fromkeys(key for result in results if isinstance(result, dict) for key in result if key != "score")
        for key in keys:
            values = [result.get(key) if isinstance(result, dict) else None for result in results]
            log_extra(f"{spec.name}/{key}", values)
            for value in values:
                if isinstance(value, numbers.Real):
                    log_metric(f"rewards/{spec.name}/{key}", float(value))
        return [_score(spec.name, result) for result in results]

    def compute_score(completions: list, log_extra: Any, log_metric: Any, **columns: list) -> list[Any]:
        texts = [messages[0]["content"] for messages in completions]
        return note([function(**given(text, columns, i)) for i, text in enumerate(texts)], log_extra, log_metric)

    async def compute_later(completions: list, log_extra: Any, log_metric: Any, **columns: list) -> list[Any]:
        import asyncio  # as in `reward_worker`

        texts = [messages[0]["content"] for messages in completions]
        results = await asyncio.gather(*(function(**given(text, columns, i)) for i, text in enumerate(texts)))
        return note(results, log_extra, log_metric)

    return compute_later if inspect.iscoroutinefunction(function) else compute_score


def _score(name: str, result: Any) -> Any:
    if not isinstance(result, dict):
        return result
    if "score" not in result:
        raise ConfigError(f"reward function {name}", sorted(map(str, result)), "give the mapping an entry `score`")
    return result["score"]
