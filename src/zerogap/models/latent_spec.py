"""Latent attention of a model: ranks and head sizes, read from `config.json` as transformers defines `deepseek_v3`."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from zerogap.errors import ConfigError
from zerogap.models.config_keys import MISSING, switch, whole
from zerogap.numerics import Numerics
from zerogap.ops.latent import LatentSizes

LATENT_FAMILIES = ("deepseek_v3",)


@dataclasses.dataclass(frozen=True)
class LatentSpec:
    """Latent attention (multi-head latent attention, DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Attributes:
        sizes: heads and their parts, and the latent that keys and values share.
        q_rank: size of the compressed query; None: queries come from the hidden state in one step.
        interleaved: rotation turns neighbouring elements (`rope_interleave`), not the halves of a head.
        norm_eps: of the norms of both latents. transformers and DeepSeek's own code leave `rms_norm_eps` out of these
            two, so it is 1e-6 whatever the config says.
    """

    sizes: LatentSizes
    q_rank: int | None = None
    interleaved: bool = True
    norm_eps: float = 1e-6

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "LatentSpec | None":
        """Read a `config.json` mapping; None for a family with plain attention.

        Raises:
            ConfigError: a needed key is missing, or asks for something that is not computed.
        """
        if config.get("model_type") not in LATENT_FAMILIES:
            return None
        heads, rope = whole(config, "num_attention_heads"), whole(config, "qk_rope_head_dim")
        if config.get("num_key_value_heads", heads) not in (None, heads):
            mend = f"latent attention has one key per query head: {heads}, as num_attention_heads"
            raise ConfigError("config.num_key_value_heads", config["num_key_value_heads"], mend)
        nope = whole(config, "qk_nope_head_dim")
        # Written by some versions of transformers, which derive it; it never decides anything.
        for key, derived in (("head_dim", (rope, nope + rope)), ("qk_head_dim", (nope + rope,))):
            if config.get(key) not in (None, *derived):
                raise ConfigError(
                    f"config.{key}", config[key], f"qk_nope_head_dim and qk_rope_head_dim say {derived[-1]}"
                )
        if "q_lora_rank" not in config:
            raise ConfigError("config.q_lora_rank", MISSING, "give its size, or null where queries are not compressed")
        for key in ("qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank", "v_head_dim"):
            if whole(config, key) % 16:
                raise ConfigError(f"config.{key}", config[key], "the kernels of latent attention need a multiple of 16")
        return cls(
            sizes=LatentSizes(heads, nope, rope, whole(config, "kv_lora_rank"), whole(config, "v_head_dim")),
            q_rank=None if config["q_lora_rank"] is None else whole(config, "q_lora_rank"),
            interleaved=switch(config, "rope_interleave", default=True),  # what the family is by definition
        )

    def leaves(self, numerics: Numerics) -> int:
        """Leaves of the query heads: every projection that has them must split (q, o and both parts of `kv_b_proj`)."""
        sizes = self.sizes
        return numerics.head_leaves(sizes.num_heads, sizes.q_width, sizes.out_width, sizes.num_heads * sizes.nope)

    def to_hf(self) -> dict[str, Any]:
        """The keys of `config.json` from which `from_hf` and transformers read this spec."""
        sizes = self.sizes
        return {
            "q_lora_rank": self.q_rank,
            "kv_lora_rank": sizes.latent,
            "qk_nope_head_dim": sizes.nope,
            "qk_rope_head_dim": sizes.rope,
            "qk_head_dim": sizes.nope + sizes.rope,
            "head_dim": sizes.rope,
            "v_head_dim": sizes.value,
            "rope_interleave": self.interleaved,
        }
