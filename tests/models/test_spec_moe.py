"""ModelSpec of routed and latent families: what is read, what is refused by name, which tensors and leaves result."""

import dataclasses
import math

import pytest
import transformers
from safetensors.torch import load_file

from tests.models_on_disk import tiny_spec
from zerogap.errors import ConfigError
from zerogap.models.spec import ModelSpec
from zerogap.numerics import DType, preset

CLASSES = {"qwen3_moe": transformers.Qwen3MoeConfig, "deepseek_v3": transformers.DeepseekV3Config}
QWEN = {
    "model_type": "qwen3_moe",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "max_position_embeddings": 40960,
    "use_sliding_window": False,
    "sliding_window": None,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
MOONLIGHT = {
    "model_type": "deepseek_v3",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 163840,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "max_position_embeddings": 8192,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 2.446,
    "num_nextn_predict_layers": 0,
    "bos_token_id": 163584,
    "eos_token_id": 163586,
}
DEEPSEEK = MOONLIGHT | {
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "vocab_size": 129280,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    "max_position_embeddings": 163840,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
}
LONGER = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
CONFIGS = {"qwen3-30b": QWEN, "moonlight": MOONLIGHT, "deepseek-v3": DEEPSEEK}


def size(config):
    return sum(math.prod(w.shape) for w in ModelSpec.from_hf(config).weight_specs(preset("bf16")).values())


def test_the_published_models_by_hand():
    """Parameters from sizes alone, buffers included: 30.5, 16.0 and 671.0 thousand million, as they are named."""
    attention = 2048 * (3072 + 576 + 2048) + 512 + 4096 * 512 + 2 * 2048
    experts = 3 * 2048 * (64 * 1408 + 2816) + 64 * 2048 + 64
    whole = 2 * 163840 * 2048 + 2048 + 27 * attention + 3 * 2048 * 11264 + 26 * experts
    assert size(MOONLIGHT) == whole == 15_960_110_208
    assert size(QWEN) == 30_532_122_624
    assert size(DEEPSEEK) == 671_026_419_200
    spec = ModelSpec.from_hf(MOONLIGHT)
    assert (spec.moe.num_experts, spec.moe.top_k, spec.moe.shared_size, spec.moe.dense_layers) == (64, 6, 2816, (0,))
    assert (spec.mla.q_rank, spec.mla.interleaved, spec.mla.norm_eps, spec.rope_dim) == (None, True, 1e-6, 64)
    assert (spec.head_dim, spec.num_kv_heads, spec.norm_eps) == (192, 16, 1e-5)
    deepseek = ModelSpec.from_hf(DEEPSEEK)
    routing = deepseek.moe.routing
    assert (routing.scoring, routing.groups, routing.top_groups, routing.scaling) == ("sigmoid", 8, 4, 2.5)
    assert deepseek.mla.q_rank == 1536 and deepseek.moe.routed_layers(61) == tuple(range(3, 61))
    qwen = ModelSpec.from_hf(QWEN)
    assert (qwen.moe.routing.scoring, qwen.moe.has_bias, qwen.qk_norm) == ("softmax", False, True)


@pytest.mark.parametrize("name", CONFIGS)
def test_written_configs_are_read_back_by_us_and_by_transformers(name):
    spec = ModelSpec.from_hf(CONFIGS[name])
    written = spec.to_hf(DType.BF16)
    assert ModelSpec.from_hf(written) == spec
    theirs = CLASSES[spec.family](**written)
    assert ModelSpec.from_hf(theirs.to_dict()) == spec
    assert ModelSpec.from_hf(CLASSES[spec.family](**CONFIGS[name]).to_dict()) == spec


@pytest.mark.parametrize(
    ("config", "key"),
    [
        *[(QWEN, key) for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")],
        *[(QWEN, key) for key in ("decoder_sparse_step", "intermediate_size")],
        *[(MOONLIGHT, key) for key in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")],
        *[(MOONLIGHT, key) for key in ("v_head_dim", "n_routed_experts", "num_experts_per_tok", "norm_topk_prob")],
        *[(MOONLIGHT, key) for key in ("n_group", "topk_group", "routed_scaling_factor", "first_k_dense_replace")],
        *[(MOONLIGHT, key) for key in ("moe_intermediate_size", "intermediate_size", "rms_norm_eps")],
    ],
)
def test_a_missing_key_is_refused_by_name(config, key):
    with pytest.raises(ConfigError, match=f"config.{key}"):
        ModelSpec.from_hf({k: v for k, v in config.items() if k != key})


@pytest.mark.parametrize(
    ("config", "change", "key"),
    [
        (QWEN, {"num_local_experts": 64}, "num_experts"),
        (QWEN, {"num_experts_per_tok": 129}, "num_experts_per_tok"),
        (QWEN, {"layer_types": 5}, "layer_types"),
        (QWEN, {"model_type": ["qwen3_moe"]}, "model_type"),
        (QWEN, {"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": LONGER}, "rope_scaling"),
        (QWEN, {"norm_topk_prob": None}, "norm_topk_prob"),
        (QWEN, {"mlp_only_layers": 3}, "mlp_only_layers"),
        (QWEN, {"mlp_only_layers": ["0"]}, "mlp_only_layers"),
        (QWEN, {"mlp_only_layers": list(range(48))}, "mlp_only_layers"),
        (QWEN, {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        (QWEN, {"use_sliding_window": True, "sliding_window": 4096}, "sliding_window"),
        (MOONLIGHT, {"scoring_func": "softmax"}, "scoring_func"),
        (MOONLIGHT, {"topk_method": "greedy"}, "topk_method"),
        (MOONLIGHT, {"topk_method": "group_limited_greedy"}, "topk_method"),
        (MOONLIGHT, {"moe_layer_freq": 2}, "moe_layer_freq"),
        (MOONLIGHT, {"n_group": 3}, "n_group"),
        (MOONLIGHT, {"n_group": 64, "topk_group": 8}, "n_group"),
        (MOONLIGHT, {"topk_group": 2}, "topk_group"),
        (DEEPSEEK, {"topk_group": 1, "num_experts_per_tok": 33}, "num_experts_per_tok"),
        (MOONLIGHT, {"routed_scaling_factor": 0.0}, "routed_scaling_factor"),
        (MOONLIGHT, {"n_shared_experts": -1}, "n_shared_experts"),
        (MOONLIGHT, {"first_k_dense_replace": 27}, "first_k_dense_replace"),
        (MOONLIGHT, {"first_k_dense_replace": -1}, "first_k_dense_replace"),
        (MOONLIGHT, {"num_key_value_heads": 4}, "num_key_value_heads"),
        (MOONLIGHT, {"head_dim": 128}, "head_dim"),
        (MOONLIGHT, {"qk_head_dim": 128}, "qk_head_dim"),
        (MOONLIGHT, {"kv_lora_rank": 500}, "kv_lora_rank"),
        (MOONLIGHT, {"q_lora_rank": 0}, "q_lora_rank"),
        (MOONLIGHT, {"rope_interleave": "yes"}, "rope_interleave"),
        (MOONLIGHT, {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers"),
        (MOONLIGHT, {"hidden_act": "gelu"}, "hidden_act"),
        (MOONLIGHT, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.rope_type"),
    ],
)
def test_an_unsupported_value_is_refused_by_name_and_value(config, change, key):
    with pytest.raises(ConfigError, match=rf"^config\.{key}( =|:)") as error:
        ModelSpec.from_hf({**config, **change})
    value = {**config, **change}.get(key)
    assert value is None or str(value) in str(error.value)


def test_sizes_that_a_record_or_a_config_cannot_hold():
    """A record holds expert numbers in 16 bits; config.json counts shared experts."""
    with pytest.raises(ConfigError, match=r"num_experts = 32769: choose 1 to 32768"):
        ModelSpec.from_hf(QWEN | {"num_experts": 32769})
    with pytest.raises(ConfigError, match=r"moe\.shared_size = 2817: choose a multiple of expert_size \(1408\)"):
        dataclasses.replace(ModelSpec.from_hf(MOONLIGHT).moe, shared_size=2817)


def test_spellings_that_mean_the_same():
    """Both names of the number of experts; a key per head, or none said; head_dim as transformers wrote it once."""
    other = {k: v for k, v in QWEN.items() if k not in ("num_experts", "mlp_only_layers")} | {"num_local_experts": 128}
    assert ModelSpec.from_hf(other) == ModelSpec.from_hf(QWEN)
    moonlight = ModelSpec.from_hf(MOONLIGHT)
    absent = ("num_key_value_heads", "moe_layer_freq", "scoring_func", "topk_method", "num_nextn_predict_layers")
    assert ModelSpec.from_hf({k: v for k, v in MOONLIGHT.items() if k not in absent}) == moonlight
    for same in ({"head_dim": 64}, {"head_dim": 192}, {"qk_head_dim": 192}, {"num_key_value_heads": None}):
        assert ModelSpec.from_hf(MOONLIGHT | same) == moonlight
    none = ModelSpec.from_hf(MOONLIGHT | {"n_shared_experts": None})
    assert none.moe.shared_size == 0 and not [n for n in none.weight_specs(preset("bf16")) if "shared_experts" in n]


@pytest.mark.parametrize(
    ("step", "only", "expected"), [(1, [], ()), (2, [], (0, 2, 4)), (3, [5], (0, 1, 3, 4, 5)), (1, [0, 9], (0,))]
)
def test_which_layers_of_qwen3_moe_are_dense(step, only, expected):
    """Layers step - 1, 2 * step - 1, ... route, but for those listed; written configs say the same by a list."""
    spec = ModelSpec.from_hf(QWEN | {"num_hidden_layers": 6, "decoder_sparse_step": step, "mlp_only_layers": only})
    assert spec.moe.dense_layers == expected
    assert ModelSpec.from_hf(spec.to_hf()) == spec
    config = transformers.Qwen3MoeConfig(**QWEN | {"num_hidden_layers": 6}) if step == 1 and not only else None
    assert config is None or spec.moe.routed_layers(6) == tuple(range(6))


@pytest.mark.parametrize("family", CLASSES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("change", [{}, {"attention_bias": True}, {"q_lora_rank": None}, {"first_dense": 0}])
def test_tensor_names_and_shapes_are_those_of_a_checkpoint_of_transformers(tmp_path, family, tied, change):
    """As `save_pretrained` writes them: experts apart, buffers included."""
    written = tiny_spec(family, tied).to_hf(DType.FP32) | {k: v for k, v in change.items() if k != "first_dense"}
    if "first_dense" in change and family == "deepseek_v3":
        written["first_k_dense_replace"] = 0
    config = CLASSES[family](**written)
    model = getattr(transformers, type(config).__name__.replace("Config", "ForCausalLM"))(config)
    model.save_pretrained(tmp_path)
    theirs = {name: tuple(t.shape) for name, t in load_file(tmp_path / "model.safetensors").items()}
    ours = {n: s.shape for n, s in ModelSpec.from_hf(config.to_dict()).weight_specs(preset("fp32")).items()}
    assert ours == theirs


def test_leaves_stacks_and_kinds():
    layer = "model.layers.1."
    qwen = ModelSpec.from_hf(QWEN).weight_specs(preset("bf16"))
    assert list(qwen) == sorted(qwen)
    q, k, down = (
        qwen[layer + name]
        for name in ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "mlp.experts.17.down_proj.weight")
    )
    assert (q.out_leaves, k.out_leaves, down.in_leaves, down.out_leaves) == (8, 4, 1, 1)
    assert down.stack == (layer + "mlp.experts.down_proj", 17, 128) and down.shape == (2048, 768)
    assert qwen[layer + "mlp.gate.weight"].kind == "matrix"
    moonlight = ModelSpec.from_hf(MOONLIGHT).weight_specs(preset("bf16"))
    attn, mlp = layer + "self_attn.", layer + "mlp."
    assert moonlight[attn + "q_proj.weight"].out_leaves == moonlight[attn + "o_proj.weight"].in_leaves == 8
    assert moonlight[attn + "kv_a_proj_with_mqa.weight"].shape == (576, 2048)
    expansion = moonlight[attn + "kv_b_proj.weight"]
    assert (expansion.kind, expansion.shape, expansion.head_parts) == ("heads", (4096, 512), (16, 128, 128))
    assert moonlight[mlp + "shared_experts.down_proj.weight"].in_leaves == 2
    assert moonlight[mlp + "gate.e_score_correction_bias"].kind == "buffer"
    assert moonlight["model.layers.0.mlp.down_proj.weight"].in_leaves == 8


ATTENTION = {"qwen3_moe": ["q_proj", "k_proj", "v_proj", "o_proj"], "deepseek_v3": None}
ATTENTION["deepseek_v3"] = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]


@pytest.mark.parametrize("family", CLASSES)
def test_exactly_the_expected_tensors_are_quantised(family):
    """Experts and shared experts are in; router, expansion and buffers are out, also from `mlp.gate`'s look-alikes."""
    spec = tiny_spec(family)
    parts = ("gate_proj", "up_proj", "down_proj")
    expected = {f"model.layers.{i}.self_attn.{name}.weight" for i in range(2) for name in ATTENTION[family]}
    for layer in range(2):
        mlp = f"model.layers.{layer}.mlp."
        if layer in spec.moe.dense_layers:
            expected |= {f"{mlp}{part}.weight" for part in parts}
            continue
        expected |= {f"{mlp}experts.{e}.{part}.weight" for e in range(spec.moe.num_experts) for part in parts}
        expected |= {f"{mlp}shared_experts.{part}.weight" for part in parts if spec.moe.shared_size}
    assert {n for n, w in spec.weight_specs(preset("fp8")).items() if w.fp8} == expected
    kept = spec.weight_specs(preset("fp8", bf16_tensors=["mlp.experts.*.gate_proj"]))
    assert {n for n, w in kept.items() if w.fp8} == {n for n in expected if not (".experts." in n and "gate_proj" in n)}


@pytest.mark.parametrize("pattern", ["mlp.experts.3", "experts.0.up_proj"])
def test_one_expert_cannot_be_kept_alone(pattern):
    with pytest.raises(ConfigError, match=r"bf16_layers\.tensors.*experts share a form"):
        tiny_spec("qwen3_moe").weight_specs(preset("fp8", bf16_tensors=[pattern]))


def test_leaves_need_every_projection_of_a_head():
    """The values' width decides, too: 8 heads of 16 leave one leaf, whatever queries would allow."""
    spec = ModelSpec.from_hf(MOONLIGHT)
    sizes = dataclasses.replace(spec.mla.sizes, num_heads=8, value=16)
    assert dataclasses.replace(spec.mla, sizes=sizes).leaves(preset("bf16")) == 1
    assert spec.mla.leaves(preset("bf16")) == 8
