"""The `algorithm` section of a recipe: how rewards become a loss."""

from typing import Literal

import pydantic
from pydantic import Field

from zerogap.config.correction import CorrectionConfig
from zerogap.config.section import NonNegative, Positive, Section
from zerogap.errors import ConfigError


class AlgorithmConfig(Section):
    """How rewards become a loss."""

    loss_type: Literal["dapo", "grpo", "dr_grpo", "sequence_sum"] = Field(
        default="dapo",
        description="how per-token losses are joined: `dapo` mean over the batch's tokens; `grpo` mean of each "
        "sequence's mean; `dr_grpo` sum over sequences x max_completion_length; `sequence_sum` mean of sequence sums",
    )
    scale_rewards: Literal["group", "batch", "none"] = Field(
        default="group",
        description="divide centred rewards by the standard deviation of their group, of the batch, or not",
    )
    epsilon: NonNegative = Field(default=0.2, description="the probability ratio is clipped below at 1 - epsilon")
    epsilon_high: NonNegative | None = Field(
        default=None, description="... and above at 1 + epsilon_high; null: epsilon"
    )
    beta: NonNegative = Field(
        default=0.0, description="weight of the KL to the initial model; 0: no reference model is kept"
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        default="k3", description="per-token KL estimate that beta multiplies"
    )
    entropy_coef: float = Field(default=0.0, description="weight of the entropy, subtracted from the loss")
    num_iterations: Positive = Field(default=1, description="optimizer updates on each batch of completions")
    mask_truncated_completions: bool = Field(
        default=False, description="leave completions that reached max_completion_length out of the loss"
    )
    correction: CorrectionConfig = CorrectionConfig()

    @pydantic.model_validator(mode="after")
    def _clip_range(self) -> "AlgorithmConfig":
        if self.epsilon >= 1.0:
            raise ConfigError("algorithm.epsilon", self.epsilon, "choose a number from 0 to below 1")
        return self

    @property
    def clip_high(self) -> float:
        """`epsilon_high`, or `epsilon` where it is not given."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high
