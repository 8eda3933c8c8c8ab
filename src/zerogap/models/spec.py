"""What a model is: the facts of a Hugging Face `config.json` that decide tensors and arithmetic, read without guessing.

A key that decides bits and is missing, or has a value that the decoder does not compute, raises `ConfigError` with the
key, the value and the mend, before any weight is read. Keys that only describe training (`attention_dropout`,
`initializer_range`) are ignored on purpose: nothing here ever drops or initialises anything. Sources: the configuration
classes of transformers for `llama`, `qwen2` and `qwen3`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from zerogap.errors import ConfigError
from zerogap.models.config_keys import MISSING, number, switch, whole
from zerogap.models.refusals import refuse_unsupported
from zerogap.models.rope_spec import RopeSpec
from zerogap.numerics import DType, Numerics, names_tensor
from zerogap.types import FP8Blocks, WeightSpec

FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """A dense decoder. Sizes are logical (unsharded); `head_dim` is a multiple of 16."""

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

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ConfigError("config.model_type", self.family, f"supported are {', '.join(FAMILIES)}")
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
        if family not in FAMILIES:
            raise ConfigError("config.model_type", family, f"supported are {', '.join(FAMILIES)}")
        refuse_unsupported(config)
        hidden, heads = whole(config, "hidden_size"), whole(config, "num_attention_heads")
        head_dim = config.get("head_dim")
        if head_dim is not None:
            head_dim = whole(config, "head_dim")
        elif family == "qwen3":  # its default is 128 whatever the hidden size, so absence says nothing
            raise ConfigError("config.head_dim", MISSING, "qwen3 models state it; add it to config.json")
        elif hidden % heads:
            raise ConfigError("config.hidden_size", hidden, f"not a multiple of num_attention_heads ({heads})")
        else:
            head_dim = hidden // heads  # the definition of llama and qwen2, not a guess
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
            num_kv_heads=whole(config, "num_key_value_heads"),
            head_dim=head_dim,
            vocab_size=whole(config, "vocab_size"),
            norm_eps=number("rms_norm_eps", config.get("rms_norm_eps", MISSING)),
            rope=RopeSpec.from_hf(config),
            tied=switch(config, "tie_word_embeddings"),
            qkv_bias=bias or family == "qwen2",
            o_bias=bias and family != "qwen2",
            qk_norm=family == "qwen3",
            max_position=whole(config, "max_position_embeddings"),
            eos_token_ids=token_ids(config.get("eos_token_id")),
            bos_token_id=config.get("bos_token_id"),
            pad_token_id=config.get("pad_token_id"),
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
        else:
            config |= {"use_sliding_window": False, "sliding_window": None}
        return config

    @property
    def q_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim

    def weight_specs(self, numerics: Numerics) -> dict[str, WeightSpec]:
        """Every tensor of the checkpoint by its Hugging Face name, in checkpoint-name order (`sorted`).

        A tied head is `model.embed_tokens.weight` itself; there is no `lm_head.weight` then.
        """
        hidden, leaf_size = self.hidden_size, numerics.vocab_leaf_size(self.vocab_size)
        embed = "model.embed_tokens.weight"
        shape = (self.vocab_size, hidden)
        specs = [
            WeightSpec(embed, shape, "embedding", out_leaf_size=leaf_size if self.tied else 0),
            WeightSpec("model.norm.weight", (hidden,), "vector"),
        ]
        if not self.tied:
            specs.append(WeightSpec("lm_head.weight", shape, "matrix", out_leaf_size=leaf_size))
        for layer in range(self.num_layers):
            specs += self._quantised(self._layer_specs(f"model.layers.{layer}.", numerics), layer, numerics)
        by_name = {spec.name: spec for spec in sorted(specs, key=lambda spec: spec.name)}
        if numerics.linear is DType.FP8 and not any(spec.fp8 for spec in specs):
            kept = (numerics.bf16_first, numerics.bf16_last, *numerics.bf16_tensors)
            mend = f"nothing of this model's {self.num_layers} layers is left to quantise: keep less, or choose bf16"
            raise ConfigError("numerics.bf16_layers", kept, mend)
        for pattern in numerics.bf16_tensors:
            if not any(names_tensor(pattern, name) for name in by_name):
                mend = "no tensor of this model matches; patterns are whole parts of names, such as mlp.down_proj"
                raise ConfigError("numerics.bf16_layers.tensors", pattern, mend)
        return by_name

    def _quantised(self, specs: list[WeightSpec], layer: int, numerics: Numerics) -> list[WeightSpec]:
        """The specs of one layer, with the matrices marked that the contract quantises."""
        blocks = FP8Blocks(numerics.scale_format, numerics.linear_grad is DType.FP8)
        return [
            dataclasses.replace(spec, fp8=blocks)
            if spec.kind == "matrix" and numerics.quantises(spec.name, layer, self.num_layers)
            else spec
            for spec in specs
        ]

    def _layer_specs(self, prefix: str, numerics: Numerics) -> list[WeightSpec]:
        hidden, inner = self.hidden_size, self.intermediate_size
        q_leaves = numerics.head_leaves(self.num_heads, self.q_width)
        kv_leaves = numerics.head_leaves(self.num_kv_heads, self.kv_width)
        mlp_leaves = numerics.axis_leaves(inner)
        attn, mlp = prefix + "self_attn.", prefix + "mlp."
        specs = [
            WeightSpec(attn + "q_proj.weight", (self.q_width, hidden), "matrix", out_leaves=q_leaves),
            WeightSpec(attn + "k_proj.weight", (self.kv_width, hidden), "matrix", out_leaves=kv_leaves),
            WeightSpec(attn + "v_proj.weight", (self.kv_width, hidden), "matrix", out_leaves=kv_leaves),
            WeightSpec(attn + "o_proj.weight", (hidden, self.q_width), "matrix", in_leaves=q_leaves),
            WeightSpec(mlp + "gate_proj.weight", (inner, hidden), "matrix", out_leaves=mlp_leaves),
            WeightSpec(mlp + "up_proj.weight", (inner, hidden), "matrix", out_leaves=mlp_leaves),
            WeightSpec(mlp + "down_proj.weight", (hidden, inner), "matrix", in_leaves=mlp_leaves),
            WeightSpec(prefix + "input_layernorm.weight", (hidden,), "vector"),
            WeightSpec(prefix + "post_attention_layernorm.weight", (hidden,), "vector"),
        ]
        if self.qkv_bias:
            widths = {"q": self.q_width, "k": self.kv_width, "v": self.kv_width}
            specs += [WeightSpec(f"{attn}{part}_proj.bias", (width,), "vector") for part, width in widths.items()]
        if self.o_bias:
            specs.append(WeightSpec(attn + "o_proj.bias", (hidden,), "vector"))
        if self.qk_norm:
            leaves = {"q": q_leaves, "k": kv_leaves}
            shape = (self.head_dim,)
            specs += [WeightSpec(f"{attn}{p}_norm.weight", shape, "vector", head_leaves=leaves[p]) for p in "qk"]
        return specs


def token_ids(value: object) -> tuple[int, ...]:
    """`eos_token_id` of a config, which is null, an id or a list of ids, as a tuple without repeats."""
    if value is None:
        return ()
    ids = value if isinstance(value, list | tuple) else [value]
    return tuple(dict.fromkeys(ids))
