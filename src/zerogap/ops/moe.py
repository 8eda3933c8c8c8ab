"""Mixture of experts: by which rule a router chooses and weights the experts of a token.

    softmax:  score = softmax(logits)
    sigmoid:  score = 1 / (1 + exp(-logit)), as DeepSeek-V3 (arXiv 2412.19437, section 2.1.2)
    choice = score + bias;  a group's score is the sum of its two largest choices; only the best groups are eligible;
    the top_k choices win, ties to the lower expert index
    weight = score [/ (sum over the chosen + eps)] * scaling

Sources: the modeling code of `qwen3_moe` (softmax, no eps) and `deepseek_v3` (sigmoid, eps 1e-20) in transformers.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Routing:
    """The rule of a router.

    Attributes:
        num_experts, top_k: experts, and how many of them a token runs.
        scoring: `softmax` or `sigmoid`.
        normalise: the weights of the chosen are divided by their sum.
        scaling: factor of the weights, after that.
        groups, top_groups: experts stand in so many equal groups, of which so many are eligible for a token.
    """

    num_experts: int
    top_k: int
    scoring: str
    normalise: bool
    scaling: float
    groups: int = 1
    top_groups: int = 1
