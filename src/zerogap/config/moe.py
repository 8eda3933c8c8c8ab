"""The `moe` section of a recipe: what a run of a mixture-of-experts model adds."""

from pydantic import Field

from zerogap.config.section import NonNegative, Section


class MoEConfig(Section):
    """Routing evidence, and what keeps experts evenly loaded. Refused for models without routed experts."""

    record_routing: bool = Field(
        default=False,
        description="record the experts of every sampled token, hold the trainer's against them, and log both; changes "
        "no bit",
    )
    balance_loss: NonNegative = Field(
        default=0.0,
        description="coefficient of the balance loss (DeepSeek-V3's, per sequence; mean over completions, sum over "
        "layers); 0: none",
    )
    router_bias_rate: NonNegative = Field(
        default=0.0,
        description="by how much an update moves each expert's correction bias towards even loads; 0: biases stay; "
        "only for models that have such biases",
    )
