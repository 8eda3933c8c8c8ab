"""The sections of a recipe about the course of a run: updates, parity, evaluation, checkpoints, logs."""

from typing import Annotated, Literal

import pydantic
from pydantic import Field

from zerogap.config.section import Count, NonNegative, Positive, Section
from zerogap.errors import ConfigError


class OptimizerConfig(Section):
    """AdamW, its schedule, and how a step is cut into passes."""

    max_steps: Positive = Field(description="steps of the run; each step samples once and updates num_iterations times")
    learning_rate: NonNegative = Field(default=1e-6, description="peak learning rate")
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="course after warm-up: constant, or falling to 0 at the last update"
    )
    warmup_steps: Count = Field(default=0, description="updates over which the learning rate rises linearly from 0")
    weight_decay: NonNegative = Field(default=0.0, description="decoupled weight decay (matrices only)")
    max_grad_norm: NonNegative = Field(
        default=1.0, description="gradients are scaled down to this global norm; 0: never"
    )
    betas: tuple[Annotated[float, Field(ge=0.0, lt=1.0)], Annotated[float, Field(ge=0.0, lt=1.0)]] = Field(
        default=(0.9, 0.999), description="decay of AdamW's first and second moments"
    )
    eps: Annotated[float, Field(gt=0.0)] = Field(default=1e-8, description="added to AdamW's denominator")
    micro_batch_tokens: Positive = Field(
        default=4096, description="most tokens of one forward and backward pass; bounds memory, changes no bit"
    )
    activation_recompute: bool = Field(
        default=False, description="recompute activations in the backward pass; saves memory, changes no bit"
    )


class ParityConfig(Section):
    """What happens when log-probs of rollout and trainer differ although they must not."""

    on_mismatch: Literal["abort", "warn"] = Field(
        default="abort", description="end the run before the update, or go on"
    )


class EvalConfig(Section):
    """Held-out evaluation."""

    every: Count = Field(
        default=0, description="steps between evaluations; 0: only before the first and after the last step"
    )
    num_prompts: Count = Field(
        default=64, description="held-out prompts per evaluation, the first ones; 0: no evaluation"
    )
    num_samples: Positive = Field(default=1, description="completions per prompt (n of mean@n and pass@k)")
    temperature: Annotated[float, Field(ge=0.0)] = Field(default=0.0, description="0: greedy")
    pass_k: tuple[Positive, ...] = Field(default=(1,), description="report pass@k for these k")

    @pydantic.model_validator(mode="after")
    def _enough_samples(self) -> "EvalConfig":
        if self.pass_k and max(self.pass_k) > self.num_samples:
            raise ConfigError("eval.pass_k", list(self.pass_k), f"choose at most num_samples ({self.num_samples})")
        if self.num_samples > 1 and self.temperature == 0.0:
            raise ConfigError(
                "eval.num_samples", self.num_samples, "choose 1, or a temperature above 0: greedy ones are all equal"
            )
        return self


class CheckpointConfig(Section):
    """What is kept on disk to resume from."""

    every: Count = Field(default=0, description="steps between checkpoints; 0: only the final model is saved")
    keep: Positive = Field(default=2, description="most checkpoints kept; the oldest are deleted")


class LoggingConfig(Section):
    """What a run writes besides checkpoints."""

    tensorboard: bool = Field(default=True, description="write TensorBoard event files")
    wandb: bool | Annotated[str, Field(min_length=1)] = Field(
        default=False,
        description="log to Weights & Biases (needs `zerogap[wandb]`): true: to the project zerogap; or the name of a "
        "project",
    )
    completions: Count = Field(
        default=4, description="completions per step that go into the completions file and the report"
    )
    audit_every: Count = Field(
        default=0,
        description="steps between saved weights that `zerogap audit` recomputes from; 0: the first and last step",
    )
