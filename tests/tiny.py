"""Tiny models of every family: small enough for exhaustive tests, with the shapes that make kernels work for it
(grouped queries, widths that are no multiple of a panel, several leaves in the MLP)."""

from typing import Any

from zerogap.models.decoder import Decoder
from zerogap.models.latent_spec import LatentSpec
from zerogap.models.moe_spec import MoESpec
from zerogap.models.rope_spec import RopeSpec
from zerogap.models.spec import ModelSpec
from zerogap.numerics import preset
from zerogap.ops.latent import LatentSizes
from zerogap.ops.moe import Routing
from zerogap.weights.random_model import random_tensors

FAMILIES = ("llama", "qwen2", "qwen3")
MOE_FAMILIES = ("qwen3_moe", "deepseek_v3")


def tiny_spec(family: str = "llama", **changes: object) -> ModelSpec:
    """6 query heads over 2 key/value heads of 32, hidden 128, MLP 256 (2 leaves), vocabulary 500 (4 leaves of 128).

    `qwen3_moe`: 8 experts of 64, the best 3 of each token, in both layers. `deepseek_v3`: a dense layer, then 8 experts
    in 4 groups, the best 3 of 2 groups, beside 2 shared ones; 8 query heads (2 leaves) over a latent of 256 (2 tiles).
    """
    facts: dict = {
        "family": family,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_layers": 2,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 32,
        "vocab_size": 500,
        "norm_eps": 1e-5,
        "rope": RopeSpec(10000.0),
        "tied": family in ("llama", "qwen2"),
        "qkv_bias": family == "qwen2",
        "o_bias": False,
        "qk_norm": family in ("qwen3", "qwen3_moe"),
        "max_position": 1024,
    }
    if family == "qwen3_moe":
        facts["moe"] = MoESpec(Routing(8, 3, "softmax", normalise=True, scaling=1.0), expert_size=64)
    if family == "deepseek_v3":
        rule = Routing(8, 3, "sigmoid", normalise=True, scaling=2.5, groups=4, top_groups=2)
        facts |= {"num_heads": 8, "num_kv_heads": 8, "head_dim": 64, "mla": LatentSpec(LatentSizes(8, 32, 32, 256, 32))}
        facts["moe"] = MoESpec(rule, expert_size=64, shared_size=128, dense_layers=(0,), has_bias=True)
    return ModelSpec(**{**facts, **changes})


def tiny_decoder(
    family: str = "llama",
    numerics: str = "bf16",
    seed: int = 1,
    peak: float = 1.0,
    spec: ModelSpec | None = None,
    **changes: Any,
) -> Decoder:
    """A loaded decoder with random weights; the same seed gives the same weights. `changes`: fields of the contract."""
    spec = spec or tiny_spec(family)
    return Decoder(spec, preset(numerics, **changes)).load(random_tensors(spec, seed=seed, peak=peak))
