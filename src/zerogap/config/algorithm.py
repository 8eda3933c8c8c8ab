"""The `algorithm` section of a recipe: how rewards become a loss.

`algorithm.name` sets the leaves that make a published algorithm; whatever a recipe says itself wins. What a run stores
is complete, so that no leaf of it depends on the name any more.
"""

from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from zerogap.config.correction import CorrectionConfig
from zerogap.config.section import Fraction01, NonNegative, Positive, Section
from zerogap.errors import ConfigError

ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "dapo": {
        "loss_type": "dapo",
        "epsilon_high": 0.28,
        "overlong_share": 0.2,
        "dynamic_sampling": {"max_rounds": 10},
    },
    "gspo": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
    },
    "cispo": {"loss_type": "dapo", "surrogate": "cispo", "epsilon": 1.0, "epsilon_high": 4.0},
    "rloo": {
        "loss_type": "sequence_sum",
        "baseline": "leave_one_out",
        "scale_rewards": "none",
        "kl_in_reward": True,
        "kl_estimator": "k1",
    },
    "reinforce_pp": {
        "loss_type": "dapo",
        "baseline": "none",
        "scale_rewards": "whiten",
        "kl_in_reward": True,
        "kl_estimator": "k1",
    },
    "reinforce_pp_baseline": {"loss_type": "dapo", "scale_rewards": "whiten", "kl_estimator": "k2"},
}
"""Name of an algorithm -> leaves that differ from the defaults; docs/which-algorithm.md says where they come from."""


class GroupFilterConfig(Section):
    """Groups (all completions of one prompt) that are left out of the loss and of its denominators."""

    equal_rewards: bool = Field(
        default=False, description="leave out groups whose rewards are all equal; dynamic sampling always does"
    )
    mean_reward: tuple[float, float] | None = Field(
        default=None, description="leave out groups whose mean reward is outside [low, high]; null: none"
    )

    @pydantic.model_validator(mode="after")
    def _a_range(self) -> "GroupFilterConfig":
        if self.mean_reward is not None and self.mean_reward[0] > self.mean_reward[1]:
            mend = "give the smaller number first"
            raise ConfigError("algorithm.group_filter.mean_reward", list(self.mean_reward), mend)
        return self


class DynamicSamplingConfig(Section):
    """Replacing groups that are left out by further prompts."""

    max_rounds: Annotated[int, Field(ge=0, le=4096)] = Field(
        default=0,
        description="a group that is left out is replaced by one of the next prompt, until all stay or this many "
        "rounds were sampled (the first included); 0: no replacement",
    )


class AlgorithmConfig(Section):
    """How rewards become a loss."""

    name: (
        Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp", "reinforce_pp_baseline"] | None
    ) = Field(
        default=None,
        description="a published algorithm, whose values become the defaults of this section (docs/which-algorithm.md)",
    )
    loss_type: Literal["dapo", "grpo", "dr_grpo", "sequence_sum"] = Field(
        default="dapo",
        description="how per-token losses are joined: `dapo` mean over the batch's tokens; `grpo` mean of each "
        "sequence's mean; `dr_grpo` sum over sequences x max_completion_length; `sequence_sum` mean of sequence sums",
    )
    baseline: Literal["group", "leave_one_out", "none"] = Field(
        default="group",
        description="what is subtracted from a reward: the mean of its group, the mean of the group's others, nothing",
    )
    scale_rewards: Literal["group", "batch", "none", "whiten"] = Field(
        default="group",
        description="divide centred rewards by the standard deviation of their group, of the batch, or not; `whiten`: "
        "subtract the mean over the batch's tokens and divide by their standard deviation",
    )
    surrogate: Literal["clip", "cispo"] = Field(
        default="clip",
        description="loss of a token: `clip` the clipped probability ratio times the advantage (PPO); `cispo` the "
        "clipped ratio as a fixed weight of advantage times log-prob, so that no token loses its gradient",
    )
    importance_sampling_level: Literal["token", "sequence"] = Field(
        default="token",
        description="the ratio that is clipped: each token's, or the geometric mean over the completion (GSPO)",
    )
    epsilon: NonNegative = Field(
        default=0.2, description="the ratio is clipped below at 1 - epsilon (`cispo`: 1 or more: not clipped below)"
    )
    epsilon_high: NonNegative | None = Field(
        default=None, description="... and above at 1 + epsilon_high; null: epsilon"
    )
    beta: NonNegative = Field(
        default=0.0, description="weight of the KL to the initial model; 0: no reference model is kept"
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        default="k3", description="per-token KL estimate that beta multiplies"
    )
    kl_in_reward: bool = Field(
        default=False,
        description="subtract the KL from the reward instead of adding it to the loss; with baseline none, from a "
        "token's advantage the KL of itself and the tokens after it",
    )
    entropy_coef: float = Field(default=0.0, description="weight of the entropy, subtracted from the loss")
    num_iterations: Positive = Field(default=1, description="optimizer updates on each batch of completions")
    mask_truncated_completions: bool = Field(
        default=False, description="leave completions that reached max_completion_length out of the loss"
    )
    overlong_share: Fraction01 = Field(
        default=0.0,
        description="over the last part of max_completion_length, this share of it, the reward falls linearly by up to "
        "1 (DAPO's soft punishment); 0: not",
    )
    group_filter: GroupFilterConfig = GroupFilterConfig()
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    correction: CorrectionConfig = CorrectionConfig()

    @pydantic.model_validator(mode="before")
    @classmethod
    def _defaults_of_the_name(cls, given: Any) -> Any:
        name = given.get("name") if isinstance(given, dict) else None
        return _filled(given, ALGORITHMS[name]) if isinstance(name, str) and name in ALGORITHMS else given

    @pydantic.model_validator(mode="after")
    def _can_be_honoured(self) -> "AlgorithmConfig":
        if self.epsilon >= 1.0 and self.surrogate == "clip":
            raise ConfigError("algorithm.epsilon", self.epsilon, "choose a number from 0 to below 1")
        if self.baseline == "none" and self.scale_rewards in ("group", "batch"):
            mend = "choose whiten or none: with baseline none there is nothing centred to divide"
            raise ConfigError("algorithm.scale_rewards", self.scale_rewards, mend)
        return self

    @property
    def clip_high(self) -> float:
        """`epsilon_high`, or `epsilon` where it is not given."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def loss_beta(self) -> float:
        """Weight of the KL in the loss: `beta`, or 0 where the KL is part of the reward."""
        return 0.0 if self.kl_in_reward else self.beta

    @property
    def drops_equal_rewards(self) -> bool:
        """True if groups of equal rewards are left out."""
        return self.group_filter.equal_rewards or self.dynamic_sampling.max_rounds > 0


def _filled(given: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """A copy of `given` with the values of `defaults` where it has none, section by section."""
    filled = dict(given)
    for key, value in defaults.items():
        if key not in filled:
            filled[key] = value
        elif isinstance(value, dict) and isinstance(filled[key], dict):
            filled[key] = _filled(filled[key], value)
    return filled
