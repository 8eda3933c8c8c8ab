"""How many parameters a model has, by what they are for: all of them, those a token uses, those that are trained.

A token uses every tensor but the experts that its router does not choose. That is the number models are named by
(30B-A3B), which counts embedding and head in full.
"""

import dataclasses
import math
from collections.abc import Collection

from zerogap.models.spec import ModelSpec
from zerogap.numerics import PRESETS
from zerogap.types import WeightSpec

PARTS = ("embedding", "head", "attention", "MLP", "experts", "shared experts", "router", "norms")


@dataclasses.dataclass(frozen=True)
class PartCount:
    """Parameters of one part of a model.

    Attributes:
        part: one of `PARTS`.
        total, active, trained: all of them, those that one token uses, those that are trained.
    """

    part: str
    total: int
    active: int
    trained: int


def part_of(weight: WeightSpec) -> str:
    """What a tensor belongs to: one of `PARTS`. A tied head is the embedding."""
    name = weight.name
    if name.startswith("model.embed_tokens."):
        return "embedding"
    if name.startswith("lm_head."):
        return "head"
    if "norm" in name.split(".")[-2]:
        return "norms"
    if ".mlp.experts." in name:
        return "experts"
    if ".mlp.shared_experts." in name:
        return "shared experts"
    if ".mlp.gate." in name:
        return "router"
    return "attention" if ".self_attn." in name else "MLP"


def count_parameters(spec: ModelSpec, trained: Collection[str] = ()) -> list[PartCount]:
    """Counts of the parts that the model has, in the order of `PARTS`.

    Args:
        trained: names of the tensors that are trained.
    """
    counts: dict[str, list[int]] = {part: [0, 0, 0] for part in PARTS}
    chosen = set(trained)
    for weight in spec.weight_specs(PRESETS["bf16"]).values():
        size, sums = math.prod(weight.shape), counts[part_of(weight)]
        sums[0] += size
        sums[2] += size if weight.name in chosen else 0
    for part, sums in counts.items():
        sums[1] = sums[0]
        if part == "experts" and spec.moe is not None:
            sums[1] = sums[0] * spec.moe.top_k // spec.moe.num_experts
    return [PartCount(part, *sums) for part, sums in counts.items() if sums[0]]


def total(counts: list[PartCount]) -> PartCount:
    """The sums over all parts."""
    return PartCount("all", *(sum(getattr(c, name) for c in counts) for name in ("total", "active", "trained")))
