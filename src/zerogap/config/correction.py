"""Settings of the correction for a rollout that computes other probabilities than the trainer; see rl/correction.py.

Names and defaults are those that users know: truncated importance sampling (TIS), masked importance sampling (MIS) per
token, completion or geometric mean, IcePop, veto, and rejection by an estimate of the KL divergence.
"""

from typing import Annotated, Literal

import pydantic
from pydantic import Field

from zerogap.config.section import Section
from zerogap.errors import ConfigError

RATIO_BOUNDS: dict[str, tuple[float | None, float | None]] = {
    "none": (None, None),
    "token_tis": (None, 2.0),
    "sequence_tis": (None, 2.0),
    "token_mis": (0.5, 2.0),
    "sequence_mis": (0.5, 2.0),
    "sequence_mask": (None, 3.0),
    "geometric_mis": (0.999, 1.001),
    "icepop": (0.5, 5.0),
}
"""Lower and upper ratio bound of each kind of correction where the recipe gives none; None: no such bound."""

IMPLIED_REJECTION = {
    "token_mis": "token_k1",
    "sequence_mis": "sequence_sum_k1",
    "geometric_mis": "sequence_mean_k1",
}

REJECTIONS = tuple(
    f"{level}_{kl}"
    for level in ("token", "sequence_sum", "sequence_mean", "sequence_max")
    for kl in ("k1", "k2", "k3")
    if (level, kl) != ("sequence_max", "k1")
)


class CorrectionConfig(Section):
    """What is done about tokens that the rollout drew with other probabilities than the trainer's.

    Only for runs whose sides differ: with one contract on both sides every ratio is exactly 1.
    """

    kind: Literal[
        "none", "token_tis", "sequence_tis", "token_mis", "sequence_mis", "sequence_mask", "geometric_mis", "icepop"
    ] = Field(
        default="none",
        description="importance weight of a token, with rho = p_trainer / p_rollout. `token_tis`: min(rho, upper); "
        "`sequence_tis`: the same of the product of rho over the completion; `token_mis`, `sequence_mis`: rho where "
        "lower <= rho <= upper, tokens or completions outside are rejected; `geometric_mis`: 1, completions whose "
        "geometric mean of rho is outside are rejected; `icepop`, `sequence_mask`: rho of token or completion, 0 "
        "outside (such a token still counts in the loss's denominator, a rejected one does not); `none`: 1",
    )
    lower: float | None = Field(
        default=None,
        description="lower bound of the ratio; null: 0.5 (`geometric_mis` 0.999; the others have none)",
    )
    upper: float | None = Field(
        default=None,
        description="upper bound; null: 2 (`sequence_mask` 3, `icepop` 5, `geometric_mis` 1.001)",
    )
    reject: dict[str, float | tuple[float, float]] = Field(
        default={},
        description="more rejection, {statistic: limit}. Statistics: `token_`, `sequence_sum_`, `sequence_mean_` or "
        "`sequence_max_` with `k1` (log rho; limit [low, high] on the ratio, or high alone for 1/high..high), `k2` "
        "((log rho)^2 / 2) or `k3` (rho - 1 - log rho; limit: the largest value kept). Example: "
        "{sequence_mean_k3: 0.01}",
    )
    veto: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        default=1e-4,
        description="a completion with any token of a smaller ratio is rejected whole; 0: never. Without a kind or "
        "reject it does nothing",
    )
    normalise: bool = Field(
        default=False,
        description="divide weights by their mean over the batch (over tokens, or over completions for sequence_*), so "
        "that a correction does not change the size of the step",
    )

    @pydantic.model_validator(mode="after")
    def _can_be_honoured(self) -> "CorrectionConfig":
        def refuse(name: str, mend: str) -> None:
            raise ConfigError(f"algorithm.correction.{name}", getattr(self, name), mend)

        default = RATIO_BOUNDS[self.kind]
        for name, bound in (("lower", default[0]), ("upper", default[1])):
            if getattr(self, name) is not None and bound is None and (self.kind, name) != ("sequence_mask", "lower"):
                refuse(name, f"leave it out: kind {self.kind} has no {name} bound")
        if self.lower is not None and not 0.0 < self.lower <= 1.0:
            refuse("lower", "choose a number above 0, at most 1: an exact token has ratio 1 and must pass")
        if self.upper is not None and not self.upper >= 1.0:
            refuse("upper", "choose 1 or more: an exact token has ratio 1 and must pass")
        if self.normalise and self.kind in ("none", "geometric_mis"):
            refuse("normalise", f"choose false, or another kind: the weights of kind {self.kind} are all 1")
        for name, limit in self.reject.items():
            if name not in REJECTIONS:
                refuse("reject", f"unknown statistic {name}; known: {', '.join(REJECTIONS)}")
            if name == IMPLIED_REJECTION.get(self.kind):
                refuse("reject", f"leave {name} out: kind {self.kind} rejects by it; set lower and upper instead")
            if name.endswith("k1"):
                low, high = limit if isinstance(limit, tuple) else (1.0 / limit if limit > 0.0 else 0.0, limit)
                if not 0.0 < low <= 1.0 <= high:
                    refuse("reject", f"give {name} as [low, high] with 0 < low <= 1 <= high, or as one number from 1")
            elif isinstance(limit, tuple) or limit <= 0.0:
                refuse("reject", f"give {name} one limit above 0")
        return self

    @property
    def active(self) -> bool:
        """Whether a batch is changed at all."""
        return self.kind != "none" or bool(self.reject)

    @property
    def bounds(self) -> tuple[float | None, float | None]:
        """Lower and upper ratio bound, defaults filled in."""
        lower, upper = RATIO_BOUNDS[self.kind]
        return (lower if self.lower is None else self.lower), (upper if self.upper is None else self.upper)

    @property
    def rejections(self) -> dict[str, float | tuple[float, float]]:
        """Every rejection that is asked for, by statistic: `reject`, and the one that a `*_mis` kind consists of."""
        implied = IMPLIED_REJECTION.get(self.kind)
        lower, upper = self.bounds
        if implied is None:
            return dict(self.reject)
        assert lower is not None and upper is not None, "every masking kind has two bounds"
        return {implied: (lower, upper), **self.reject}
