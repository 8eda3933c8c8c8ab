"""What a model is: the facts of a Hugging Face `config.json` that decide tensors and arithmetic, read without guessing.

A key that decides bits and is missing, or has a value that the decoder does not compute, raises `ConfigError` with the
key, the value and the mend, before any weight is read. Keys that only describe training (`attention_dropout`,
`initializer_range`) are ignored on purpose: nothing here ever drops or initialises anything. Sources: the configuration
classes of transformers for `llama`, `qwen2`, `qwen3`, `qwen3_moe` and `deepseek_v3` (Moonlight, too).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from zerogap.errors import ConfigError
from zerogap.models.config_keys import MISSING, number, switch, whole
from zerogap.models.latent_spec import LATENT_FAMILIES, LatentSpec
from zerogap.models.moe_spec import ROUTED_FAMILIES, MoESpec
from zerogap.models.refusals import refuse_unsupported
from zerogap.models.rope_spec import RopeSpec
from zerogap.models.tensors import tensor_specs
from zerogap.numerics import DType, Numerics
from zerogap.types import WeightSpec

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """A decoder. Sizes are logical (unsharded); `head_dim` is a multiple of 16.

    Attributes:
        intermediate_size: inner size of dense MLPs.
        head_dim: elements of a query head, and of a key and a value but where `mla` says otherwise.
        qkv_bias: biases of q, k and v; with `mla`, of the projections down to the latents.
        moe: the routed layers, or None where all MLPs are dense.
        mla: latent attention, or None for plain attention. `num_kv_heads` is `num_heads` then.
    """

    family: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    rope: RopeSpec
    tied: bool
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    max_position: int
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    moe: MoESpec | None = None
    mla: LatentSpec | None = None

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ConfigError("config.model_type", self.family, f"supported are {', '.join(FAMILIES)}")
        assert (self.moe is None) == (self.family not in ROUTED_FAMILIES), f"{self.family} with {self.moe}"
        assert (self.mla is None) == (self.family not in LATENT_FAMILIES), f"{self.family} with {self.mla}"
        if self.head_dim % 16:
            raise ConfigError("config.head_dim", self.head_dim, "the attention kernels need a multiple of 16")
        if self.num_heads % self.num_kv_heads:
            mend = f"num_attention_heads ({self.num_heads}) must be a multiple of it"
            raise ConfigError("config.num_key_value_heads", self.num_kv_heads, mend)
        for key in ("eos_token_ids", "bos_token_id", "pad_token_id"):
            value = getattr(self, key)
            for token in value if isinstance(value, tuple) else (value,):
                # -1 and ids beyond the vocabulary stand for "none" in some configs; they can never be drawn.
                if token is not None and not isinstance(token, int):
                    raise ConfigError(f"config.{key}", value, "give token ids as whole numbers")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelSpec":
        """Read a `config.json` mapping.

        Raises:
            ConfigError: a needed key is missing, or asks for something that the decoder does not compute.
        """
        family = config.get("model_type", MISSING)
        if not isinstance(family, str) or family not in FAMILIES:
            raise ConfigError("config.model_type", family, f"supported are {', '.join(FAMILIES)}")
        refuse_unsupported(config)
        hidden, heads = whole(config, "hidden_size"), whole(config, "num_attention_heads")
        mla = LatentSpec.from_hf(config)
        head_dim = mla.sizes.nope + mla.sizes.rope if mla else _head_dim(config, family, hidden, heads)
        # Absent means no bias for these families; a bias tensor in the file would be reported as unexpected.
        bias = switch(config, "attention_bias", default=False)
        if family == "qwen2" and "attention_bias" in config and not bias:
            raise ConfigError("config.attention_bias", False, "qwen2 always has q, k and v biases; remove the key")
        return cls(
            family=family,
            hidden_size=hidden,
            intermediate_size=whole(config, "intermediate_size"),
            num_layers=whole(config, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=heads if mla else whole(config, "num_key_value_heads"),
            head_dim=head_dim,
            vocab_size=whole(config, "vocab_size"),
            norm_eps=number("rms_norm_eps", config.get("rms_norm_eps", MISSING)),
            rope=RopeSpec.from_hf(config),
            tied=switch(config, "tie_word_embeddings"),
            qkv_bias=bias or family == "qwen2",
            o_bias=bias and family != "qwen2",
            qk_norm=family in ("qwen3", "qwen3_moe"),
            max_position=whole(config, "max_position_embeddings"),
            eos_token_ids=token_ids(config.get("eos_token_id")),
            bos_token_id=config.get("bos_token_id"),
            pad_token_id=config.get("pad_token_id"),
            moe=MoESpec.from_hf(config),
            mla=mla,
        )

    def to_hf(self, storage: DType = DType.BF16) -> dict[str, Any]:
        """A `config.json` mapping that transformers (both spellings of RoPE) and `from_hf` read back to this spec."""
        dtype = {DType.FP32: "float32", DType.BF16: "bfloat16"}[storage]
        eos = self.eos_token_ids
        config: dict[str, Any] = {
            "architectures": [FAMILIES[self.family]],
            "model_type": self.family,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope.theta,
            "rope_scaling": None if self.rope.kind == "default" else self.rope.to_hf(),
            "rope_parameters": {"rope_theta": self.rope.theta} | self.rope.to_hf(),
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": self.max_position,
            "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else list(eos),
            "bos_token_id": self.bos_token_id,
            "pad_token_id": self.pad_token_id,
            "torch_dtype": dtype,
            "dtype": dtype,
            "use_cache": True,
        }
        if self.family != "qwen2":
            config["attention_bias"] = self.qkv_bias
        if self.family == "llama":
            config["mlp_bias"] = False
        elif self.mla is None:
            config |= {"use_sliding_window": False, "sliding_window": None}
        if self.mla is not None:  # extra prediction heads are neither read nor written
            config |= self.mla.to_hf() | {"num_nextn_predict_layers": 0}
        if self.moe is not None:
            config |= self.moe.to_hf(self.family)
        return config

    @property
    def rope_dim(self) -> int:
        """Rotated elements of a head."""
        return self.head_dim if self.mla is None else self.mla.sizes.rope

    @property
    def q_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim

    def weight_specs(self, numerics: Numerics) -> dict[str, WeightSpec]:
        """Every tensor of the checkpoint by its Hugging Face name, in checkpoint-name order (`sorted`).

        A tied head is `model.embed_tokens.weight` itself; there is no `lm_head.weight` then. Stacks of experts and the
        expansion of latent attention are `WeightSpec.stack` and kind `heads`.

        Raises:
            ConfigError: the contract names a tensor that there is not, or quantises nothing, or part of a stack.
        """
        return tensor_specs(self, numerics)


def _head_dim(config: Mapping[str, Any], family: str, hidden: int, heads: int) -> int:
    if config.get("head_dim") is not None:
        return whole(config, "head_dim")
    if family == "qwen3":  # its default is 128 whatever the hidden size, so absence says nothing
        raise ConfigError("config.head_dim", MISSING, "qwen3 models state it; add it to config.json")
    if hidden % heads:
        raise ConfigError("config.hidden_size", hidden, f"not a multiple of num_attention_heads ({heads})")
    return hidden // heads  # the definition of llama, qwen2 and qwen3_moe, not a guess


def token_ids(value: object) -> tuple[int, ...]:
    """`eos_token_id` of a config, which is null, an id or a list of ids, as a tuple without repeats."""
    if value is None:
        return ()
    ids = value if isinstance(value, list | tuple) else [value]
    return tuple(dict.fromkeys(ids))
