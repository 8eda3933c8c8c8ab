"""Over how many devices a model is spread, as a plan: this version runs one process, the rest is arithmetic.

`tp` ranks split leaves (docs/numerics.md, "Reductions that a layout may split"), `ep` ranks split experts, `dp` ranks
split the samples of a batch; tp x dp devices in all, and experts lie on ep of them. Copies of a tensor that several
ranks hold, masters and moments among them, are counted on each.
"""

import dataclasses
import math

from zerogap.errors import ConfigError
from zerogap.models.spec import ModelSpec
from zerogap.numerics import Numerics
from zerogap.types import WeightSpec


@dataclasses.dataclass(frozen=True)
class Layout:
    """A layout of tp x dp devices."""

    tp: int = 1
    ep: int = 1
    dp: int = 1

    @property
    def devices(self) -> int:
        return self.tp * self.dp

    def __str__(self) -> str:
        return f"tp={self.tp},ep={self.ep},dp={self.dp}"

    @classmethod
    def parse(cls, text: str | None, devices: int | None) -> "Layout":
        """Read `tp=1,ep=8,dp=8`. What is not given is 1, but for dp, which takes what is left of `devices`.

        Raises:
            ConfigError: not of that form, or not so many devices.
        """
        sizes: dict[str, int] = {}
        for word in (text or "").replace(" ", "").split(","):
            key, equals, number = word.partition("=")
            if not word:
                continue
            if key not in ("tp", "ep", "dp") or not equals or not number.isdecimal() or int(number) < 1 or key in sizes:
                raise ConfigError("--layout", text, "write it as tp=1,ep=8,dp=8, each a positive number, once")
            sizes[key] = int(number)
        tp, ep = sizes.get("tp", 1), sizes.get("ep", 1)
        if devices is not None and devices < 1:
            raise ConfigError("--devices", devices, "choose 1 or more")
        if devices is not None and devices % tp:
            raise ConfigError("--layout", text, f"tp must divide the {devices} devices")
        dp = sizes.get("dp", 1 if devices is None else devices // tp)
        if devices is not None and tp * dp != devices:
            raise ConfigError("--layout", text, f"tp x dp is {tp * dp}, and there are {devices} devices")
        if (tp * dp) % ep:
            raise ConfigError("--layout", text, f"ep must divide the {tp * dp} devices: experts lie on ep of them")
        return cls(tp, ep, dp)

    def require(self, spec: ModelSpec) -> None:
        """Raise `ConfigError` where the model has no such layout."""
        if self.ep > 1 and (spec.moe is None or spec.moe.num_experts % self.ep):
            experts = "no experts" if spec.moe is None else f"{spec.moe.num_experts} experts"
            raise ConfigError("--layout", str(self), f"this model has {experts}: choose an ep that divides them, or 1")

    def ranks_of(self, weight: WeightSpec, numerics: Numerics) -> int:
        """Over how many ranks a tensor is split; a rank holds whole leaves, or whole experts."""
        if weight.stack is not None:
            return self.ep
        leaves = max(weight.in_leaves, weight.out_leaves)
        if weight.kind == "embedding" or weight.out_leaf_size:
            leaves = -(-weight.shape[0] // numerics.vocab_leaf_size(weight.shape[0]))
        if weight.head_parts is not None:
            leaves = weight.head_parts[0]
        return math.gcd(self.tp, leaves)
