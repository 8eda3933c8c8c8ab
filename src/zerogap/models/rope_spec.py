"""The rotary embedding of a model's config: its base and the scaling of its frequencies, in both spellings.

`rope_parameters` is the new one, `rope_theta` with `rope_scaling` the old one; `rope_type` was once called `type`.
Sources: the Llama 3.1 model code (`llama3`) and YaRN (Peng et al. 2023; `yarn`), as transformers' modeling_rope_utils
and DeepSeek-V3 read them. `ops.rope` computes the frequencies.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from zerogap.errors import ConfigError
from zerogap.models.config_keys import MISSING, number, switch
from zerogap.ops.rope import KINDS, yarn_scale


@dataclasses.dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding; a kind's numbers are unused by the others.

    Attributes:
        theta: base of the frequencies.
        kind: `default`, `llama3` or `yarn`.
        factor: by how much low frequencies are divided (`llama3`, `yarn`).
        low_freq_factor, high_freq_factor: full turns inside the original context that bound the blend (`llama3`).
        original_max_position: the context that the model was first trained with (`llama3`, `yarn`).
        beta_fast, beta_slow: full turns inside the original context that bound the blend (`yarn`).
        mscale, mscale_all_dim: weights of log(factor) in the attention factor; 0 stands for absent (`yarn`).
        attention_factor: of cosines and sines, where the config states it; None: it follows from the others (`yarn`).
        truncate: the bounds of the blend are moved to whole pairs (`yarn`).
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "RopeSpec":
        """Read a `config.json` mapping.

        Raises:
            ConfigError: no base, a kind that is not computed, or a number that the kind needs is missing or odd.
        """
        both = config.get("rope_parameters") is not None and config.get("rope_scaling") is not None
        where = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
        table = config.get(where) or {}
        if not isinstance(table, Mapping):
            raise ConfigError(f"config.{where}", table, "give a mapping with rope_type")
        theta = table.get("rope_theta", config.get("rope_theta", MISSING))
        if theta == MISSING:
            raise ConfigError("config.rope_theta", MISSING, "add the base of the rotary embedding to config.json")
        theta = number("rope_theta", theta)
        kind = table.get("rope_type", table.get("type", "default"))
        if kind not in KINDS:
            raise ConfigError(f"config.{where}.rope_type", kind, f"only {', '.join(KINDS)} are computed")
        if number(f"{where}.partial_rotary_factor", table.get("partial_rotary_factor", 1.0)) != 1.0:
            raise ConfigError(f"config.{where}.partial_rotary_factor", table["partial_rotary_factor"], "only 1.0 works")
        read = {"llama3": _llama3, "yarn": _yarn}
        spec = read[kind](theta, table, where) if kind in read else cls(theta)
        if both and cls.from_hf({"rope_theta": theta, "rope_scaling": config["rope_scaling"]}) != spec:
            mend = "rope_parameters says something else; remove one of them"
            raise ConfigError("config.rope_scaling", config["rope_scaling"], mend)
        return spec

    @property
    def score_factor(self) -> float:
        """Factor of the softmax scale of DeepSeek-V3's attention: the square of what `mscale_all_dim` says, else 1.

        Other families scale cosines and sines alone (`ops.rope.attention_factor`).
        """
        if self.kind != "yarn" or not self.mscale_all_dim:
            return 1.0
        return yarn_scale(self.factor, self.mscale_all_dim) ** 2

    def to_hf(self) -> dict[str, Any]:
        """The `rope_scaling` mapping (without theta), from which `from_hf` and transformers read the same numbers."""
        table: dict[str, Any] = {"rope_type": self.kind}
        if self.kind == "default":
            return table
        table["factor"] = self.factor
        if self.kind == "llama3":
            table |= {"low_freq_factor": self.low_freq_factor, "high_freq_factor": self.high_freq_factor}
        table["original_max_position_embeddings"] = self.original_max_position
        if self.kind == "llama3":
            return table
        table |= {"beta_fast": self.beta_fast, "beta_slow": self.beta_slow}
        table |= {key: value for key in ("mscale", "mscale_all_dim") if (value := getattr(self, key))}
        if self.attention_factor is not None:
            table["attention_factor"] = self.attention_factor
        return table if self.truncate else table | {"truncate": False}


def _llama3(theta: float, table: Mapping[str, Any], where: str) -> RopeSpec:
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    factor, low, high, original = _needed(table, where, "llama3", keys)
    if not high > low:
        raise ConfigError(f"config.{where}.high_freq_factor", high, f"choose more than low_freq_factor ({low})")
    return RopeSpec(theta, "llama3", factor, low, high, int(original))


def _yarn(theta: float, table: Mapping[str, Any], where: str) -> RopeSpec:
    factor, original = _needed(table, where, "yarn", ("factor", "original_max_position_embeddings"))
    if factor < 1.0:
        raise ConfigError(f"config.{where}.factor", factor, "choose at least 1")

    def given(key: str) -> float | None:  # null and 0 both stand for absent
        return number(f"{where}.{key}", table[key]) if table.get(key) else None

    fast, slow = given("beta_fast") or 32.0, given("beta_slow") or 1.0
    if fast < slow:
        raise ConfigError(f"config.{where}.beta_fast", fast, f"choose at least beta_slow ({slow})")
    return RopeSpec(
        theta,
        "yarn",
        factor,
        original_max_position=int(original),
        beta_fast=fast,
        beta_slow=slow,
        mscale=given("mscale") or 0.0,
        mscale_all_dim=given("mscale_all_dim") or 0.0,
        attention_factor=given("attention_factor"),
        truncate=switch(table, "truncate", default=True),
    )


def _needed(table: Mapping[str, Any], where: str, kind: str, keys: tuple[str, ...]) -> list[float]:
    for key in keys:
        if key not in table:
            raise ConfigError(f"config.{where}.{key}", MISSING, f"{kind} scaling needs it")
    return [number(f"{where}.{key}", table[key]) for key in keys]
