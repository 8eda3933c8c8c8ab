"""The `rollout` section of a recipe: how completions are sampled."""

from typing import Annotated, Any

import pydantic
from pydantic import Field

from zerogap.config.section import Count, Fraction01, Names, Positive, Section
from zerogap.errors import ConfigError


class SpeculationConfig(Section):
    """Guess tokens from the prompt, the group and earlier completions, and verify several in one pass."""

    draft_tokens: Annotated[int, Field(ge=0, le=16)] = Field(
        default=0,
        description="most guessed tokens of a sequence in one pass; 0: off. Pays where few sequences are decoded at a "
        "time and prompts come again; changes no bit",
    )
    min_match: Annotated[int, Field(ge=1, le=16)] = Field(
        default=2, description="tokens that must agree before a place that guesses are copied from; changes no bit"
    )


class RolloutConfig(Section):
    """How completions are sampled, and the memory the engine may use."""

    numerics: str | dict[str, Any] | None = Field(
        default=None,
        description="another contract for the rollout alone, such as `fp8-kv` beside training in bf16: *one-sided*, "
        "labelled not exact everywhere, corrected by algorithm.correction; null: that of training, exact",
    )
    prompts_per_step: Positive = Field(
        default=8, description="prompts per step; each is completed num_generations times"
    )
    num_generations: Positive = Field(
        default=8, description="completions per prompt: the group that advantages compare"
    )
    max_completion_length: Positive = Field(
        default=256, description="tokens; a completion that reaches it is truncated"
    )
    temperature: float = Field(default=1.0, description="logits are divided by it, in rollout and training alike")
    top_k: Count = Field(default=0, description="keep the k likeliest ids; 0: all")
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        default=1.0, description="keep the likeliest ids of this mass"
    )
    min_p: Fraction01 = Field(
        default=0.0, description="keep ids of at least this share of the likeliest id's probability"
    )
    stop: Names = Field(default=(), description="strings that end a completion; end-of-sequence ids always do")
    page_size: Positive = Field(
        default=16, description="tokens per page of the KV cache, a multiple of 16; changes no bit"
    )
    kv_cache_memory: Annotated[float, Field(gt=0.0)] = Field(
        default=1.0, description="GiB for the KV cache; changes no bit"
    )
    max_batch_tokens: Positive = Field(default=1024, description="most tokens of one forward pass; changes no bit")
    max_sequences: Positive = Field(default=64, description="most sequences that are decoded together; changes no bit")
    prefix_cache: bool = Field(default=True, description="reuse the KV of shared prompt beginnings; changes no bit")
    speculation: SpeculationConfig = SpeculationConfig()

    @pydantic.model_validator(mode="after")
    def _can_be_honoured(self) -> "RolloutConfig":
        if not 1e-3 <= self.temperature < float("inf"):
            raise ConfigError(
                "rollout.temperature", self.temperature, "choose 0.001 or more: greedy groups carry no learning signal"
            )
        if self.page_size % 16:
            raise ConfigError("rollout.page_size", self.page_size, "choose a multiple of 16")
        if self.max_batch_tokens < self.max_sequences:
            raise ConfigError(
                "rollout.max_batch_tokens",
                self.max_batch_tokens,
                f"choose at least max_sequences ({self.max_sequences}): each sequence needs one token per pass",
            )
        return self
