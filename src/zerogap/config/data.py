"""The `data` and `reward` sections of a recipe: what is asked, and how answers are scored."""

from typing import Any

import pydantic
from pydantic import Field

from zerogap.config.section import Names, Positive, Section
from zerogap.errors import ConfigError


class DataConfig(Section):
    """Where prompts come from."""

    train: str = Field(
        description="what to train on: a path to a .jsonl file, `multiplication`, `largest_of_three`, or "
        "`reasoning_gym:NAME`. Paths are relative to the working directory"
    )
    eval: str | None = Field(
        default=None, description="a .jsonl file of held-out rows; null: the task's own held-out split"
    )
    task: dict[str, Any] = Field(default={}, description="settings of a reasoning-gym task, as that task names them")
    size: Positive = Field(default=2000, description="problems drawn from a reasoning-gym task, held-out ones included")
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


class RewardConfig(Section):
    """How completions are scored."""

    functions: Names = Field(
        default=("number_match",),
        min_length=1,
        description="reward functions: `number_match`, `task` (the scorer of a reasoning-gym task), "
        "`module:function` or `path/to/file.py:function`, with TRL's signature",
    )
    weights: tuple[float, ...] | None = Field(default=None, description="one factor per function; null: all 1")

    @pydantic.model_validator(mode="after")
    def _one_weight_each(self) -> "RewardConfig":
        if self.weights is not None and len(self.weights) != len(self.functions):
            raise ConfigError("reward.weights", list(self.weights), f"give {len(self.functions)}, one per function")
        return self
