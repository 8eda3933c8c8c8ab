"""ModelSpec: what is read from a config.json, what is refused, and which leaves every tensor gets."""

import pytest
import transformers

from tests.tiny import tiny_spec
from zerogap.errors import ConfigError
from zerogap.models.spec import ModelSpec
from zerogap.numerics import DType, preset

CLASSES = {
    "llama": transformers.LlamaConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
}
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
SMOL = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
    "eos_token_id": 2,
    "bos_token_id": 1,
}


@pytest.mark.parametrize("family", CLASSES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rope", [None, LLAMA3])
def test_reads_what_transformers_writes_and_writes_what_it_reads(family, tied, rope):
    head_dim = {} if family == "qwen2" else {"head_dim": 32}
    theirs = CLASSES[family](
        **SIZES,
        **head_dim,
        tie_word_embeddings=tied,
        rope_parameters={"rope_theta": 50000.0, **(rope or {"rope_type": "default"})},
        eos_token_id=[2, 7, 9],
        pad_token_id=2,
        attention_dropout=0.5,
    )
    spec = ModelSpec.from_hf(theirs.to_dict())
    assert (spec.family, spec.tied, spec.head_dim, spec.num_kv_heads) == (family, tied, 32, 2)
    assert spec.eos_token_ids == (2, 7, 9) and spec.pad_token_id == 2
    assert (spec.qkv_bias, spec.o_bias, spec.qk_norm) == (family == "qwen2", False, family == "qwen3")
    assert spec.rope.theta == 50000.0
    assert spec.rope.original_max_position == (256 if rope else 0)
    written = spec.to_hf(DType.FP32)
    assert ModelSpec.from_hf(written) == spec
    back = CLASSES[family](**written).to_dict()
    assert ModelSpec.from_hf(back) == spec


def test_old_and_new_rope_spelling_agree():
    old = {**SMOL, "rope_scaling": LLAMA3}
    type_key = {**SMOL, "rope_scaling": {("type" if k == "rope_type" else k): v for k, v in LLAMA3.items()}}
    new = {k: v for k, v in SMOL.items() if k != "rope_theta"} | {"rope_parameters": {"rope_theta": 100000, **LLAMA3}}
    assert ModelSpec.from_hf(old) == ModelSpec.from_hf(new) == ModelSpec.from_hf(type_key)
    assert ModelSpec.from_hf(old) != ModelSpec.from_hf(SMOL)


@pytest.mark.parametrize(
    "key",
    [
        "model_type",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "hidden_act",
        "rms_norm_eps",
        "rope_theta",
        "tie_word_embeddings",
        "max_position_embeddings",
    ],
)
def test_a_missing_key_is_refused_by_name(key):
    with pytest.raises(ConfigError, match=f"config.{key}"):
        ModelSpec.from_hf({k: v for k, v in SMOL.items() if k != key})


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"model_type": "mixtral"}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"use_sliding_window": True, "sliding_window": 64}, "sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.original_max_position_embeddings"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_scaling.rope_type"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"head_dim": 40}, "head_dim"),
        ({"num_key_value_heads": 2}, "num_key_value_heads"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"model_type": "qwen3"}, "head_dim"),
        ({"eos_token_id": "</s>"}, "eos_token_ids"),
    ],
)
def test_an_unsupported_value_is_refused_by_name(change, key):
    with pytest.raises(ConfigError, match=key):
        ModelSpec.from_hf({**SMOL, **change})


def test_unused_sliding_window_is_accepted():
    config = {**SMOL, "model_type": "qwen2", "use_sliding_window": False, "sliding_window": 4096}
    assert ModelSpec.from_hf(config).qkv_bias


def test_smollm2_tensors_and_leaves():
    specs = ModelSpec.from_hf(SMOL).weight_specs(preset("bf16"))
    assert list(specs) == sorted(specs) and len(specs) == 30 * 9 + 2
    assert "lm_head.weight" not in specs
    embed = specs["model.embed_tokens.weight"]
    assert (embed.kind, embed.shape, embed.out_leaf_size) == ("embedding", (49152, 576), 6144)
    layer = "model.layers.7."
    q, o, down = (
        specs[layer + n] for n in ("self_attn.q_proj.weight", "self_attn.o_proj.weight", "mlp.down_proj.weight")
    )
    assert (q.out_leaves, q.in_leaves, o.in_leaves, o.out_leaves) == (1, 1, 1, 1)
    assert (down.in_leaves, down.out_leaves, specs[layer + "mlp.up_proj.weight"].out_leaves) == (4, 1, 4)
    assert specs[layer + "input_layernorm.weight"].kind == "vector"


def test_llama_8b_and_qwen3_leaves():
    llama = ModelSpec.from_hf(
        {**SMOL, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336}
        | {"tie_word_embeddings": False, "vocab_size": 128256}
    ).weight_specs(preset("bf16"))
    layer = "model.layers.0."
    assert llama[layer + "self_attn.o_proj.weight"].in_leaves == 8
    assert llama[layer + "self_attn.k_proj.weight"].out_leaves == 8
    assert llama[layer + "mlp.down_proj.weight"].in_leaves == 8
    head = llama["lm_head.weight"]
    assert (head.kind, head.out_leaf_size) == ("matrix", 16064)
    assert llama["model.embed_tokens.weight"].out_leaf_size == 0
    qwen3 = ModelSpec.from_hf({**SMOL, "model_type": "qwen3", "head_dim": 128, "num_attention_heads": 16,
                               "num_key_value_heads": 8, "hidden_size": 1024, "intermediate_size": 3072})  # fmt: skip
    specs = qwen3.weight_specs(preset("bf16"))
    assert specs[layer + "self_attn.q_proj.weight"].shape == (2048, 1024)
    assert specs[layer + "self_attn.q_norm.weight"].shape == (128,)
    assert specs[layer + "self_attn.v_proj.weight"].out_leaves == 8


@pytest.mark.parametrize("family", CLASSES)
@pytest.mark.parametrize("tied", [False, True])
def test_tensor_names_and_shapes_are_those_of_transformers(family, tied):
    head_dim = {} if family == "qwen2" else {"head_dim": 48}
    bias = {"attention_bias": True} if family != "qwen2" else {}
    config = CLASSES[family](**SIZES, **head_dim, **bias, tie_word_embeddings=tied, max_position_embeddings=512)
    model = getattr(transformers, type(config).__name__.replace("Config", "ForCausalLM"))(config)
    theirs = {name: tuple(p.shape) for name, p in model.named_parameters()}
    ours = {n: s.shape for n, s in ModelSpec.from_hf(config.to_dict()).weight_specs(preset("fp32")).items()}
    assert ours == theirs


@pytest.mark.parametrize(
    "kept", [{"bf16_first": 2}, {"bf16_first": 1, "bf16_last": 1}, {"bf16_last": 100}, {"bf16_tensors": ["*"]}]
)
def test_an_fp8_contract_that_quantises_nothing_is_refused(kept):
    spec = tiny_spec("llama")
    with pytest.raises(ConfigError, match="nothing of this model's 2 layers is left to quantise"):
        spec.weight_specs(preset("fp8", **kept))
    assert any(s.fp8 for s in spec.weight_specs(preset("fp8", bf16_first=1)).values())
