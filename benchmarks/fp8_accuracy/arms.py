"""What is compared: arms (numerics of rollout and trainer) and experiments (how long and how hard the runs train).

Runs of one seed differ in their arm's keys alone, so prompts, sampling keys, learning rates and rewards are paired.
"""

import copy
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from zerogap.config import RunConfig, load_config

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "smollm2-multiplication.yaml"
BASELINE = "bf16"
UNPAIRED = ("output_dir", "checkpoint", "logging")
"""Sections of a recipe that say what is written where: they change no bit, so a stored result may differ in them."""


@dataclasses.dataclass(frozen=True)
class Arm:
    """One choice of numerics.

    Attributes:
        name: of the arm.
        text: what it is, for the table.
        rollout: name of the contract that completions are drawn under; arms of one such name share the figures of the
            untrained model.
        keys: what it changes in the recipe.
        optional: True if it only runs where it is asked for by name.
    """

    name: str
    text: str
    rollout: str
    keys: Mapping[str, Any]
    optional: bool = False


_FP8_ROLLOUT = {"numerics": "bf16", "rollout": {"numerics": "fp8-kv"}}
_TOKEN_TIS = {"correction": {"kind": "token_tis", "upper": 2.0, "veto": 0.0}}
_CALIBRATED = {"numerics": {"preset": "fp8-kv", "kv_scale": "calibrated"}}

ARMS = {
    arm.name: arm
    for arm in (
        Arm("bf16", "BF16 on both sides", "bf16", {"numerics": "bf16"}),
        Arm("fp8-rollout", "rollout FP8 with FP8 KV, training BF16, uncorrected", "fp8-kv", _FP8_ROLLOUT),
        Arm(
            "fp8-rollout-tis",
            "the same, token ratios truncated at 2",
            "fp8-kv",
            {**_FP8_ROLLOUT, "algorithm": _TOKEN_TIS},
        ),
        Arm("fp8", "linear layers FP8 on both sides", "fp8", {"numerics": "fp8"}),
        Arm("fp8-kv", "linear layers, KV and attention FP8 on both sides", "fp8-kv", {"numerics": "fp8-kv"}),
        Arm("fp8-kv-calibrated", "the same with calibrated KV scales", "fp8-kv-calibrated", _CALIBRATED, optional=True),
    )
}
DEFAULT_ARMS = tuple(name for name, arm in ARMS.items() if not arm.optional)


@dataclasses.dataclass(frozen=True)
class Experiment:
    """How every arm is trained.

    Attributes:
        steps: of each run.
        learning_rate: peak.
        schedule: `linear` or `constant`, as `optimizer.lr_scheduler_type`.
        checkpoint_every: steps; 0: a killed run begins anew.
        base: the recipe that arm and experiment change.
    """

    steps: int
    learning_rate: float
    schedule: str
    checkpoint_every: int = 0
    base: Path = RECIPE

    @property
    def name(self) -> str:
        """Folder of its results."""
        return f"steps{self.steps}-lr{self.learning_rate:g}-{self.schedule}"

    def recipe(self, arm: Arm, seed: int, folder: Path) -> RunConfig:
        """The recipe of one run, which lies in `folder`.

        Raises:
            ConfigError: a value that cannot be honoured.
        """
        base: dict[str, Any] = yaml.safe_load(self.base.read_text(encoding="utf-8"))
        own = {
            "data": {"max_prompt_length": 128},
            "optimizer": {
                "max_steps": self.steps,
                "learning_rate": self.learning_rate,
                "lr_scheduler_type": self.schedule,
            },
            "parity": {"on_mismatch": "warn"},  # a gap is a result here, not an end
            "eval": {"num_prompts": 0},  # the benchmark evaluates by itself, on more prompts
            "logging": {"tensorboard": False, "completions": 0},
            "checkpoint": {"every": self.checkpoint_every, "keep": 1},
            "seed": seed,
            "output_dir": str(folder),
        }
        return load_config(merged(merged(base, arm.keys), own))


def merged(tree: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a recipe's tree with `keys` replaced, section by section."""
    result = copy.deepcopy(dict(tree))
    for key, value in keys.items():
        inner = result.get(key)
        if isinstance(inner, dict) and isinstance(value, Mapping):
            result[key] = merged(inner, value)
        else:
            result[key] = copy.deepcopy(value)
    return result


def what_decides(config: RunConfig) -> dict[str, Any]:
    """The part of a recipe that decides a run's result, JSON-ready."""
    return {key: value for key, value in config.model_dump(mode="json").items() if key not in UNPAIRED}
