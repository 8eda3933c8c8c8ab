"""The `data` and `reward` sections of a recipe: what is asked, and how answers are scored.

Both lists take short and long entries: a data set is a path or a mapping (`DataSource`), a reward function its name or
a mapping (`RewardEntry`). Either is checked here, so that a misspelt key is named before anything is read.
"""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from zerogap.config.section import Positive, Section
from zerogap.errors import ConfigError

REASONING_GYM = "reasoning_gym:"


class DataSource(Section):
    """One data set. What is null is as the `data` section says."""

    path: str = Field(
        min_length=1, description="what `data.train` may be as a text: a file, a folder, a hub id, a task"
    )
    weight: Annotated[float, Field(gt=0.0)] = Field(default=1.0, description="share of prompts, relative to the others")
    split: str | None = Field(default=None, min_length=1, description="split of a folder or of a hub data set")
    task: dict[str, Any] | None = Field(default=None, description="settings of a reasoning-gym task")
    size: Positive | None = Field(default=None, description="problems drawn from a reasoning-gym task")
    prompt_column: str | None = Field(default=None, description="column with the prompt")
    answer_column: str | None = Field(default=None, description="column with the answer")
    system: str | None = Field(default=None, description="system message put before every prompt that has none")
    instruction: str | None = Field(default=None, description="text added to the last user message")

    @property
    def gym_task(self) -> str | None:
        """Name of the reasoning-gym task, if it is one."""
        return self.path.removeprefix(REASONING_GYM) if self.path.startswith(REASONING_GYM) else None


def _sources(value: object, info: pydantic.ValidationInfo) -> object:
    """A text or null as it is; a mapping or a list as data sets."""
    if value is None or isinstance(value, str):
        return value
    key = f"data.{info.field_name}"
    entries = value if isinstance(value, list | tuple) else [value]
    if not entries:
        raise ConfigError(key, value, "give at least one data set")
    return tuple(_source(entry, f"{key}[{i}]") for i, entry in enumerate(entries))


def _source(entry: object, key: str) -> DataSource:
    if isinstance(entry, DataSource):
        return entry
    if not isinstance(entry, str | Mapping):
        raise ConfigError(key, entry, "give a path, or a mapping with `path`")
    try:
        return DataSource.model_validate({"path": entry} if isinstance(entry, str) else entry)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            raise ConfigError(
                f"{key}.{name}", first["input"], f"unknown key; known here: {', '.join(DataSource.model_fields)}"
            ) from None
        if first["type"] == "missing":
            raise ConfigError(f"{key}.{name}", None, "this key must be given") from None
        raise ConfigError(f"{key}.{name}", first["input"], first["msg"].replace("Input should", "it should")) from None


Sources = Annotated[str | tuple[DataSource, ...], pydantic.BeforeValidator(_sources)]


class DataConfig(Section):
    """Where prompts come from."""

    train: Sources = Field(
        description="what to train on: a .jsonl, .json or .parquet file, a folder of such files or one that "
        "`datasets` saved, `hf:NAME[:config][:split]` (a data set of the hub), `multiplication`, `largest_of_three`, "
        "or `reasoning_gym:NAME`; or a list of them, each a path or {path, weight, split, ...}, mixed by weight "
        "(docs/bring-your-data.md). Paths are relative to the working directory"
    )
    eval: Sources | None = Field(
        default=None, description="held-out rows, given in the same ways; null: the held-out splits of tasks"
    )
    task: dict[str, Any] = Field(default={}, description="settings of a reasoning-gym task, as that task names them")
    size: Positive = Field(
        default=2000, description="problems drawn from each reasoning-gym task, held-out ones included"
    )
    prompt_column: str | None = Field(
        default=None, description="column with the prompt; null: recognise it by its name"
    )
    answer_column: str | None = Field(
        default=None, description="column with the answer; null: recognise it by its name"
    )
    system: str | None = Field(default=None, description="system message put before every prompt that has none")
    instruction: str | None = Field(
        default=None, description="text added, after a blank line, to the last user message"
    )
    max_prompt_length: Positive = Field(
        default=512, description="tokens; rows with a longer prompt are left out and counted"
    )
    shuffle: bool = Field(
        default=True, description="a new order of rows in each epoch, from (seed, epoch); false: file order"
    )

    def train_sources(self) -> tuple[DataSource, ...]:
        """What to train on, with the section's settings in place of null."""
        return self._complete(self.train)

    def eval_sources(self) -> tuple[DataSource, ...]:
        """The held-out rows that are named; empty where none are."""
        return self._complete(self.eval) if self.eval is not None else ()

    def _complete(self, sources: str | tuple[DataSource, ...]) -> tuple[DataSource, ...]:
        entries = (DataSource(path=sources),) if isinstance(sources, str) else sources
        section = {
            name: getattr(self, name)
            for name in ("task", "size", "prompt_column", "answer_column", "system", "instruction")
        }
        return tuple(
            entry.model_copy(update={k: v for k, v in section.items() if getattr(entry, k) is None})
            for entry in entries
        )


@dataclasses.dataclass(frozen=True)
class RewardEntry:
    """One reward function as a recipe asks for it.

    Attributes:
        function: `number_match`, `module:function`, ...; see `zerogap.rl.reward_loading`.
        name: in metrics; None: the function's own.
        sources: paths of the data sets whose rows it scores; None: all. Other rows get None from it.
        arguments: further keyword arguments of the function.
    """

    function: str
    name: str | None = None
    sources: tuple[str, ...] | None = None
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def scores(self, source: str) -> bool:
        """Whether rows of this data set are scored."""
        return self.sources is None or source in self.sources


def _as_functions(value: object) -> object:
    return (value,) if isinstance(value, str | Mapping) else value


def _as_entry(value: str | Mapping[str, Any], key: str) -> RewardEntry:
    if isinstance(value, str):
        return RewardEntry(value)
    given = dict(value)
    function, name, sources = given.pop("function", None), given.pop("name", None), given.pop("sources", None)
    if not isinstance(function, str) or not function:
        raise ConfigError(f"{key}.function", function, "name the function: number_match, module:function, ...")
    if name is not None and not (isinstance(name, str) and name and "/" not in name):
        raise ConfigError(f"{key}.name", name, "give a word without `/`: it stands in rewards/NAME/mean")
    if isinstance(sources, str):
        sources = [sources]
    if sources is not None and not (
        isinstance(sources, list | tuple) and sources and all(isinstance(s, str) for s in sources)
    ):
        raise ConfigError(f"{key}.sources", sources, "give paths of data.train or data.eval, as they stand there")
    if wrong := [k for k in given if not (isinstance(k, str) and k.isidentifier())]:
        raise ConfigError(f"{key}.{wrong[0]}", given[wrong[0]], "it is no name of an argument")
    return RewardEntry(function, name, None if sources is None else tuple(sources), given)


class RewardConfig(Section):
    """How completions are scored."""

    functions: Annotated[tuple[str | dict[str, Any], ...], pydantic.BeforeValidator(_as_functions)] = Field(
        default=("number_match",),
        min_length=1,
        description="reward functions: `number_match`, `math_verify`, `format`, `length`, `task` (the scorer of a "
        "reasoning-gym task), `module:function` or `path/to/file.py:function` with TRL's signature, "
        "`verl:module:function` or `verl:path/to/file.py:function` with verl's; each a text, or "
        "{function: ..., name: ..., sources: [...], argument: value} (docs/write-a-reward.md)",
    )
    weights: tuple[float, ...] | None = Field(default=None, description="one factor per function; null: all 1")
    timeout: Annotated[float, Field(gt=0.0)] | None = Field(
        default=600.0,
        description="seconds that one call of a reward function may take; functions run in processes of their own, so "
        "that one that hangs or crashes is ended and named. null: they run in the run's process, without a limit",
    )
    on_error: Literal["abort", "none"] = Field(
        default="abort",
        description="a call that raises, takes too long or returns what is no reward: `abort` ends the run with the "
        "function's name, `none` leaves the function out of these completions' rewards and counts them",
    )

    @pydantic.model_validator(mode="after")
    def _one_weight_each(self) -> "RewardConfig":
        if self.weights is not None and len(self.weights) != len(self.functions):
            raise ConfigError("reward.weights", list(self.weights), f"give {len(self.functions)}, one per function")
        self.entries()
        return self

    def entries(self) -> tuple[RewardEntry, ...]:
        """The functions, short and long ones in one form."""
        return tuple(_as_entry(value, f"reward.functions[{i}]") for i, value in enumerate(self.functions))
