"""The routed layers of a model: which they are, how large the experts, and by which rule they are chosen.

Read from `config.json` as the configuration and modeling classes of transformers define `qwen3_moe` and `deepseek_v3`.
Keys that only describe training losses (`router_aux_loss_coef`, `aux_loss_alpha`, `seq_aux`) are ignored on purpose:
the run's recipe says what is trained with.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from zerogap.errors import ConfigError
from zerogap.models.config_keys import MISSING, number, switch, whole
from zerogap.ops.moe import Routing

ROUTED_FAMILIES = ("qwen3_moe", "deepseek_v3")


@dataclasses.dataclass(frozen=True)
class MoESpec:
    """Mixture-of-experts layers.

    Attributes:
        routing: the rule by which a token's experts are chosen and weighted.
        expert_size: inner size of one expert.
        shared_size: inner size of the shared experts together, which every token runs; 0: there are none.
        dense_layers: decoder layers with a dense MLP (of `ModelSpec.intermediate_size`), ascending.
        has_bias: the choice (not the weight) adds a stored bias per expert (`e_score_correction_bias`).
    """

    routing: Routing
    expert_size: int
    shared_size: int = 0
    dense_layers: tuple[int, ...] = ()
    has_bias: bool = False

    def __post_init__(self) -> None:
        if self.shared_size % self.expert_size:
            mend = f"choose a multiple of expert_size ({self.expert_size}): config.json counts shared experts"
            raise ConfigError("moe.shared_size", self.shared_size, mend)

    @property
    def num_experts(self) -> int:
        return self.routing.num_experts

    @property
    def top_k(self) -> int:
        return self.routing.top_k

    def routed_layers(self, num_layers: int) -> tuple[int, ...]:
        """Decoder layers that route, ascending."""
        return tuple(layer for layer in range(num_layers) if layer not in self.dense_layers)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "MoESpec | None":
        """Read a `config.json` mapping; None for a family without experts.

        Raises:
            ConfigError: a needed key is missing, or asks for something that is not computed.
        """
        family = config.get("model_type")
        if family not in ROUTED_FAMILIES:
            return None
        spec = _qwen3(config) if family == "qwen3_moe" else _deepseek(config)
        if not spec.routed_layers(whole(config, "num_hidden_layers")):
            key = "mlp_only_layers" if family == "qwen3_moe" else "first_k_dense_replace"
            raise ConfigError(f"config.{key}", config.get(key), "no layer has experts then; this is a dense model")
        return spec

    def to_hf(self, family: str) -> dict[str, Any]:
        """The keys of `config.json` from which `from_hf` and transformers read this spec."""
        routing = self.routing
        keys = {
            "moe_intermediate_size": self.expert_size,
            "num_experts_per_tok": routing.top_k,
            "norm_topk_prob": routing.normalise,
        }
        if family == "qwen3_moe":
            layers = {"decoder_sparse_step": 1, "mlp_only_layers": list(self.dense_layers)}
            return keys | layers | {"num_experts": routing.num_experts}
        return keys | {
            "n_routed_experts": routing.num_experts,
            "n_shared_experts": self.shared_size // self.expert_size,
            "first_k_dense_replace": len(self.dense_layers),
            "moe_layer_freq": 1,
            "n_group": routing.groups,
            "topk_group": routing.top_groups,
            "routed_scaling_factor": routing.scaling,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
        }


def _qwen3(config: Mapping[str, Any]) -> MoESpec:
    experts = _one_of(config, "num_experts", "num_local_experts")  # transformers 5 writes the second name
    top_k = _at_most(config, "num_experts_per_tok", experts, "the number of experts")
    layers = range(whole(config, "num_hidden_layers"))
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list | tuple) or not all(type(layer) is int and layer >= 0 for layer in dense):
        raise ConfigError("config.mlp_only_layers", dense, "give a list of layer numbers, or []")
    step = whole(config, "decoder_sparse_step")
    return MoESpec(
        routing=Routing(experts, top_k, "softmax", normalise=switch(config, "norm_topk_prob"), scaling=1.0),
        expert_size=whole(config, "moe_intermediate_size"),
        dense_layers=tuple(layer for layer in layers if layer in dense or (layer + 1) % step),
    )


def _deepseek(config: Mapping[str, Any]) -> MoESpec:
    computed = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    for key, value in computed.items():  # absent: what the family is by definition
        if config.get(key, value) != value:
            raise ConfigError(f"config.{key}", config[key], f"only {value} is computed for deepseek_v3")
    experts, groups = whole(config, "n_routed_experts"), whole(config, "n_group")
    if experts % groups or experts // groups < 2:
        mend = f"the {experts} routed experts must divide into groups of two or more: a group counts by its two best"
        raise ConfigError("config.n_group", groups, mend)
    top_groups = _at_most(config, "topk_group", groups, "n_group")
    top_k = _at_most(config, "num_experts_per_tok", top_groups * (experts // groups), "those of topk_group groups")
    size, shared = whole(config, "moe_intermediate_size"), config.get("n_shared_experts")
    return MoESpec(
        routing=Routing(
            experts,
            top_k,
            "sigmoid",
            normalise=switch(config, "norm_topk_prob"),
            scaling=number("routed_scaling_factor", config.get("routed_scaling_factor", MISSING)),
            groups=groups,
            top_groups=top_groups,
        ),
        expert_size=size,
        shared_size=0 if shared in (None, 0) else size * whole(config, "n_shared_experts"),
        dense_layers=tuple(range(min(_from_zero(config, "first_k_dense_replace"), whole(config, "num_hidden_layers")))),
        has_bias=True,
    )


def _one_of(config: Mapping[str, Any], key: str, other: str) -> int:
    """A positive whole number under either of two names."""
    if key in config and other in config and config[key] != config[other]:
        raise ConfigError(f"config.{key}", config[key], f"{other} says {config[other]}; give one of them")
    return whole(config, key if key in config or other not in config else other)


def _at_most(config: Mapping[str, Any], key: str, most: int, what: str) -> int:
    value = whole(config, key)
    if value > most:
        raise ConfigError(f"config.{key}", value, f"choose at most {most}: {what}")
    return value


def _from_zero(config: Mapping[str, Any], key: str) -> int:
    """A whole number, 0 included."""
    value = config.get(key, MISSING)
    return 0 if type(value) is int and value == 0 else whole(config, key)
