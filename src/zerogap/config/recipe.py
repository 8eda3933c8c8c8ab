"""A whole recipe: all sections, and what they must agree on."""

import json
from typing import Any

import pydantic
import yaml
from pydantic import Field

from zerogap.config.algorithm import AlgorithmConfig
from zerogap.config.course import CheckpointConfig, EvalConfig, LoggingConfig, OptimizerConfig, ParityConfig
from zerogap.config.data import DataConfig, RewardConfig
from zerogap.config.moe import MoEConfig
from zerogap.config.rollout import RolloutConfig
from zerogap.config.section import Count, Names, Section
from zerogap.errors import ConfigError
from zerogap.numerics import PRESETS, Numerics, preset


def contract_of(asked: str | dict[str, Any]) -> Numerics:
    """The numerics contract that a preset's name, or {preset: NAME, field: value}, asks for.

    `bf16_layers: {first: n, last: n, tensors: [patterns]}` is the short form of `bf16_first`, `bf16_last` and
    `bf16_tensors`.

    Raises:
        ConfigError: unknown preset or field, or a value the contract cannot have.
    """
    fields: dict[str, Any] = {"preset": asked} if isinstance(asked, str) else dict(asked)
    name, kept = fields.pop("preset", "bf16"), fields.pop("bf16_layers", {})
    if not isinstance(name, str):
        raise ConfigError("numerics.preset", name, f"choose one of {', '.join(PRESETS)}")
    if "name" in fields:
        raise ConfigError("numerics.name", fields["name"], "leave it out: a contract has its preset's name")
    if not isinstance(kept, dict) or set(kept) - {"first", "last", "tensors"}:
        raise ConfigError("numerics.bf16_layers", kept, "give first, last (layers) or tensors (patterns)")
    short = {f"bf16_{key}": value for key, value in kept.items()}
    for key in short:
        if key in fields:
            raise ConfigError(f"numerics.{key}", fields[key], "bf16_layers says it, too: give it once")
    return preset(name, **fields, **short)


class RunConfig(Section):
    """A whole recipe."""

    model: str = Field(description="a Hugging Face folder, hub id or .gguf file, or `smollm2-135m-instruct`")
    trainable: Names = Field(
        default=("all",), min_length=1, description="tensors to train: `all`, `last:N` decoder layers, or name patterns"
    )
    numerics: str | dict[str, Any] = Field(
        default="bf16",
        description="a preset (`fp32`, `bf16`; `fp8`: linear layers; `fp8-kv`: linear layers, KV cache and attention), "
        "or {preset: NAME, field: value} to replace single fields, such as kv_scale: calibrated, scale_format: pow2, "
        "bf16_layers: {first: 1, last: 1}; docs/numerics.md lists all fields",
    )
    data: DataConfig
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig
    moe: MoEConfig = MoEConfig()
    parity: ParityConfig = ParityConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    seed: Count = Field(default=0, description="every random stream of the run is keyed by it")
    output_dir: str = Field(
        default="runs/zerogap", description="folder for logs, checkpoints, the model and the report"
    )

    @pydantic.model_validator(mode="after")
    def _sections_agree(self) -> "RunConfig":
        contract = self.contract()
        tokens = self.optimizer.micro_batch_tokens
        if tokens < contract.pack_tokens:
            raise ConfigError(
                "optimizer.micro_batch_tokens", tokens, f"choose at least numerics.pack_tokens ({contract.pack_tokens})"
            )
        updates = self.optimizer.max_steps * self.algorithm.num_iterations
        if self.optimizer.warmup_steps > updates:
            raise ConfigError(
                "optimizer.warmup_steps", self.optimizer.warmup_steps, f"choose at most the run's {updates} updates"
            )
        rollout = self.rollout
        if rollout.num_generations < 2 and self.algorithm.baseline != "none":
            mend = "choose 2 or more: advantages compare group members (or algorithm.baseline: none)"
            raise ConfigError("rollout.num_generations", rollout.num_generations, mend)
        if rollout.num_generations < 2 and self.algorithm.drops_equal_rewards:
            mend = "choose 2 or more: the rewards of a group of 1 are all equal, and such groups are left out"
            raise ConfigError("rollout.num_generations", rollout.num_generations, mend)
        if self.algorithm.beta and (rollout.top_k or rollout.top_p < 1.0 or rollout.min_p):
            raise ConfigError(
                "algorithm.beta",
                self.algorithm.beta,
                "choose 0, or switch rollout.top_k, top_p and min_p off: an id that the reference model's filters "
                "exclude has no KL",
            )
        if self.one_sided and (rollout.top_k or rollout.top_p < 1.0 or rollout.min_p):
            raise ConfigError(
                "rollout.numerics",
                rollout.numerics,
                "switch rollout.top_k, top_p and min_p off: an id that one side keeps may be excluded on the other",
            )
        if self.algorithm.correction.active and not self.one_sided:
            raise ConfigError(
                "algorithm.correction.kind",
                self.algorithm.correction.kind,
                "choose none: rollout and trainer compute the same bits, so every ratio is 1; corrections are for "
                "rollout.numerics of another contract",
            )
        self._rewards_fit_data()
        return self

    def _rewards_fit_data(self) -> None:
        sources = (*self.data.train_sources(), *self.data.eval_sources())
        paths = {source.path for source in sources}
        for i, entry in enumerate(self.reward.entries()):
            if entry.function == "task" and not any(source.gym_task for source in sources):
                raise ConfigError("reward.functions", "task", "only reasoning_gym:NAME data has a scorer of its own")
            for path in entry.sources or ():
                if path not in paths:
                    mend = f"it is no data set of this recipe; those are {', '.join(sorted(paths))}"
                    raise ConfigError(f"reward.functions[{i}].sources", path, mend)

    def contract(self) -> Numerics:
        """The numerics contract that `numerics` asks for (`contract_of`)."""
        return contract_of(self.numerics)

    def rollout_contract(self) -> Numerics:
        """The contract of the rollout: that of training, or the one that `rollout.numerics` asks for."""
        if self.rollout.numerics is None:
            return self.contract()
        try:
            return contract_of(self.rollout.numerics)
        except ConfigError as error:
            raise ConfigError(f"rollout.{error.key}", error.value, error.mend) from None

    @property
    def one_sided(self) -> bool:
        """True if rollout and training are asked to compute different bits."""
        return self.rollout_contract().fingerprint() != self.contract().fingerprint()

    def to_yaml(self) -> str:
        """The complete recipe, defaults included; `load_config` reads it back to an equal object."""
        return yaml.safe_dump(json.loads(self.model_dump_json()), sort_keys=False, allow_unicode=True)
