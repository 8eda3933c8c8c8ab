"""A run's numbers at Weights & Biases, under the names of metrics.jsonl; an optional package (`zerogap[wandb]`).

Whether it writes to its server, to disk alone or nowhere is as its own settings say (`WANDB_MODE`, `wandb login`). A
run that resumes is another one there, with the same name and its own first step.
"""

import importlib
import importlib.util
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerogap.errors import ConfigError

PROJECT = "zerogap"  # where the recipe names none


def require_installed(asked: bool | str) -> None:
    """Raise `ConfigError` if a recipe asks for what is not installed."""
    if asked and importlib.util.find_spec("wandb") is None:
        raise ConfigError("logging.wandb", asked, "install the extra: pip install 'zerogap[wandb]', or choose false")


class WandbWriter:
    """Writes every finite number of a record, over the run's own steps."""

    def __init__(self, folder: Path, asked: bool | str, config: Mapping[str, Any]) -> None:
        """
        Args:
            folder: of the run; W&B's own files go beneath it, and its name is the run's.
            asked: True, or the name of a project.
            config: the complete recipe.
        """
        folder.mkdir(parents=True, exist_ok=True)
        project = PROJECT if asked is True else str(asked)
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(project=project, name=folder.resolve().name, dir=str(folder), config=dict(config))
        self._run.define_metric("*", step_metric="step")

    def add(self, step: int, record: Mapping[str, Any]) -> None:
        numbers = {
            name: value
            for name, value in record.items()
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        }
        self._run.log({**numbers, "step": step})

    def close(self) -> None:
        self._run.finish()
