"""The list of quantised tensors is exactly the expected set; its bytes are those of what is computed with; another list
is refused."""

import math

import pytest

from tests.tiny import FAMILIES, MOE_FAMILIES, tiny_spec
from zerogap.errors import CheckpointError, ConfigError, ContractError
from zerogap.models.decoder import Decoder
from zerogap.models.inventory import inventory, kv_bytes, require_same_list
from zerogap.models.published import PUBLISHED
from zerogap.models.spec import ModelSpec
from zerogap.numerics import preset

LINEAR = [
    *("mlp.down_proj", "mlp.gate_proj", "mlp.up_proj"),
    *("self_attn.k_proj", "self_attn.o_proj", "self_attn.q_proj", "self_attn.v_proj"),
]


def names(layers, roles=LINEAR):
    return [f"model.layers.{layer}.{role}.weight" for layer in layers for role in roles]


def quantised(family, numerics, **changes):
    forms = inventory(tiny_spec(family, num_layers=12), preset(numerics, **changes))
    return [form.name for form in forms if form.quantised]


ORDER = [0, 1, 10, 11, *range(2, 10)]  # checkpoint-name order is that of text


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, names(ORDER)),
        ({"bf16_first": 1, "bf16_last": 2}, names([1, *range(2, 10)])),
        ({"bf16_first": 11}, names([11])),
        ({"bf16_first": 5, "bf16_last": 6}, names([5])),
        ({"bf16_tensors": ["mlp.gate_proj"]}, names(ORDER, [r for r in LINEAR if r != "mlp.gate_proj"])),
        ({"bf16_tensors": ["layers.1.mlp"]}, [n for n in names(ORDER) if not n.startswith("model.layers.1.mlp.")]),
        ({"bf16_tensors": ["layers.*.self_attn.[qk]_proj"]}, names(ORDER, [*LINEAR[:3], *LINEAR[4:5], *LINEAR[6:]])),
    ],
)
def test_exactly_the_expected_tensors_are_quantised(family, changes, expected):
    """Biases, query and key norms, embedding and head never; a layer's number is not the beginning of another's."""
    assert quantised(family, "fp8", **changes) == expected
    assert quantised(family, "fp8-kv", **changes) == expected


@pytest.mark.parametrize("numerics", ["fp32", "bf16"])
def test_without_fp8_nothing_is_quantised(numerics):
    assert quantised("qwen3", numerics) == []


@pytest.mark.parametrize(
    "pattern", ["mlp.gate", "gate", "proj", "mlp.gate_proj.weights", "layers.12", "layers.1.q_proj"]
)
def test_a_pattern_means_whole_parts_of_names(pattern):
    """`mlp.gate`, the router of other models, must not keep `mlp.gate_proj` from being quantised."""
    with pytest.raises(ConfigError, match=r"bf16_layers\.tensors.*no tensor"):
        quantised("llama", "fp8", bf16_tensors=[pattern])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_says_why(family):
    contract = preset("fp8", bf16_first=1, bf16_last=1, bf16_tensors=["mlp.down_proj"])
    spec = tiny_spec(family, num_layers=4)
    forms = {form.name: form for form in inventory(spec, contract)}
    assert list(forms) == list(spec.weight_specs(contract))
    assert all(form.quantised == (not form.why) for form in forms.values())
    assert forms["model.embed_tokens.weight"].why == ("embedding, also the head" if spec.tied else "embedding")
    assert spec.tied or forms["lm_head.weight"].why == "head"
    assert forms["model.norm.weight"].why == forms["model.layers.1.input_layernorm.weight"].why == "norm"
    assert forms["model.layers.0.mlp.down_proj.weight"].why == "option: first 1"
    assert forms["model.layers.3.mlp.up_proj.weight"].why == "option: last 1"
    assert forms["model.layers.2.mlp.down_proj.weight"].why == "option: mlp.down_proj"
    assert {f.why for f in forms.values() if f.name.endswith(".bias")} == ({"bias"} if spec.qkv_bias else set())
    assert {f.why for f in forms.values() if "_norm." in f.name} == ({"norm"} if spec.qk_norm else set())


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_routers_expansions_and_buffers_say_why_whatever_the_contract(family):
    """Their own reason, not an option's: no option makes them FP8."""
    spec = tiny_spec(family, num_layers=3)
    contract = preset("fp8", bf16_first=2, bf16_tensors=["mlp.gate"])
    for numerics in (preset("bf16"), preset("fp8"), contract):
        forms = {form.name: form for form in inventory(spec, numerics)}
        assert list(forms) == list(spec.weight_specs(numerics))
        assert all(form.quantised == (not form.why) for form in forms.values())
        layer = "model.layers.1."
        assert forms[layer + "mlp.gate.weight"].why == "router: its choice is discrete"
        if family == "deepseek_v3":
            assert forms[layer + "self_attn.kv_b_proj.weight"].why == "latent expansion, used head by head"
            bias = forms[layer + "mlp.gate.e_score_correction_bias"]
            assert (bias.why, bias.nbytes) == ("buffer of the router, FP32", 4 * spec.moe.num_experts)
            assert forms[layer + "self_attn.kv_a_layernorm.weight"].why == "norm"
    assert forms["model.layers.1.mlp.experts.0.up_proj.weight"].why == "option: first 2"
    assert forms["model.layers.2.mlp.experts.0.up_proj.weight"].quantised


def test_bytes_are_those_of_codes_and_ragged_scales():
    spec = tiny_spec("llama", hidden_size=192, intermediate_size=320)
    forms = {form.name: form for form in inventory(spec, preset("fp8"))}
    up, norm = forms["model.layers.0.mlp.up_proj.weight"], forms["model.norm.weight"]
    assert (up.shape, up.plain_bytes, up.code_bytes, up.scale_bytes) == (
        (320, 192),
        2 * 320 * 192,
        320 * 192,
        4 * 3 * 2,
    )
    assert up.nbytes == 320 * 192 + 24
    assert (norm.nbytes, norm.code_bytes, norm.scale_bytes) == (2 * 192, 0, 0)
    assert {form.plain_bytes for form in inventory(spec, preset("fp32")) if form.name == up.name} == {4 * 320 * 192}
    assert math.prod(up.shape) == up.size


def test_an_8b_model_by_hand():
    """Llama-3.1-8B: 6,979,321,856 of 8,030,261,248 parameters in linear layers; 32 layers x 2 x 8 heads of 128."""
    spec = ModelSpec.from_hf(PUBLISHED["meta-llama/Llama-3.1-8B-Instruct"])
    forms = inventory(spec, preset("fp8-kv"))
    assert sum(f.size for f in forms) == 8_030_261_248
    assert sum(f.size for f in forms if f.quantised) == 6_979_321_856 == sum(f.code_bytes for f in forms)
    assert sum(f.scale_bytes for f in forms) == 4 * 6_979_321_856 // 128**2
    assert kv_bytes(spec, preset("bf16")) == (131_072, 0)
    assert kv_bytes(spec, preset("fp8-kv")) == (65_536, 2_048)
    assert kv_bytes(spec, preset("fp8-kv", kv_scale="calibrated")) == (65_536, 0)


@pytest.mark.parametrize("family", [*FAMILIES, *MOE_FAMILIES])
@pytest.mark.parametrize(
    ("numerics", "changes"),
    [("fp32", {}), ("bf16", {}), ("fp8", {}), ("fp8-kv", {}), ("fp8-kv", {"kv_scale": "calibrated"})],
)
def test_the_list_and_the_cache_are_those_of_the_decoder(family, numerics, changes):
    contract = preset(numerics, **changes)
    decoder = Decoder(tiny_spec(family), contract)
    chosen = {form.name: form.shape for form in inventory(decoder.spec, contract) if form.quantised}
    assert list(decoder.quantised().items()) == list(chosen.items())
    assert sum(kv_bytes(decoder.spec, contract)) == len(decoder.blocks) * decoder.codec().bytes_per_token()


def test_another_list_is_refused_by_its_first_tensor():
    ours = [form.name for form in inventory(tiny_spec(), preset("fp8")) if form.quantised]
    require_same_list(ours, list(ours), "here")
    require_same_list(ours, list(reversed(ours)), "here")
    with pytest.raises(
        ContractError, match=r"RUN.*\(1\): model\.layers\.0\.mlp\.up_proj\.weight is quantised here and"
    ):
        require_same_list(ours, [n for n in ours if n != "model.layers.0.mlp.up_proj.weight"], "RUN")
    with pytest.raises(ContractError, match=r"\(1\): lm_head\.weight is quantised there and not here"):
        require_same_list(ours, [*ours, "lm_head.weight"], "RUN")
    with pytest.raises(ContractError, match=r"\(14\): model\.layers\.0\.mlp\.down_proj\.weight is"):
        require_same_list([], ours, "RUN")
    for stored in (None, "all", [1], {"a": 1}):
        with pytest.raises(CheckpointError, match="does not say"):
            require_same_list(ours, stored, "RUN")
    with pytest.raises(CheckpointError, match="twice"):
        require_same_list(ours, [*ours, ours[0]], "RUN")
