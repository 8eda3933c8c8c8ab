"""Checkpoints of routed and latent families: experts apart or stacked, FP8 blocks, FP32 buffers, extra heads."""

import dataclasses
import json
import warnings

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from tests.bits import assert_same_bits
from tests.models_on_disk import tiny_spec
from zerogap.cli import app
from zerogap.errors import CheckpointError, ConfigError
from zerogap.models.decoder import Decoder
from zerogap.models.spec import ModelSpec
from zerogap.numerics import DType, Numerics, preset
from zerogap.ops import quant
from zerogap.ops.latent import LatentSizes
from zerogap.types import BlockCodes
from zerogap.weights import open_model, save_folder
from zerogap.weights.random_model import random_tensors, write_random_model

FAMILIES = ["qwen3_moe", "deepseek_v3"]
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
KV_B = "model.layers.1.self_attn.kv_b_proj.weight"
ROUTER = "model.layers.1.mlp.gate.weight"
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


def decoder(spec, numerics, tensors, **changes):
    return Decoder(spec, preset(numerics, **changes), max_positions=64).load(tensors)


def export(path, model, max_shard_bytes=1 << 30):
    tensors = ((n, h.codes() if h.spec.fp8 else h.value()) for n, h in model.weights.items())
    return save_folder(path, model.spec, tensors, max_shard_bytes=max_shard_bytes)


def edit(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def stack(tensors, spec, suffix=""):
    """Experts as transformers 5 holds them in memory: one tensor per layer for gate and up, one for down."""
    for layer in spec.moe.routed_layers(spec.num_layers):
        prefix = f"model.layers.{layer}.mlp.experts."

        def take(part, prefix=prefix):
            names = [f"{prefix}{e}.{part}.weight{suffix}" for e in range(spec.moe.num_experts)]
            return torch.stack([tensors.pop(name) for name in names])

        tensors[f"{prefix}gate_up_proj{suffix}"] = torch.cat([take("gate_proj"), take("up_proj")], 1)
        tensors[f"{prefix}down_proj{suffix}"] = take("down_proj")


# ------------------------------------------------------------------------------------------------ there and back


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("storage", [DType.FP32, DType.BF16])
def test_round_trip_keeps_every_bit_and_transformers_reads_the_same(tmp_path, family, tied, storage):
    spec = tiny_spec(family, tied)
    expected = dict(random_tensors(spec, seed=3, storage=storage))
    for name, shard_bytes in (("whole", 1 << 30), ("shards", 100_000)):
        folder = write_random_model(tmp_path / name, spec, seed=3, storage=storage, max_shard_bytes=shard_bytes)
        files = open_model(folder)
        assert files.spec == spec
        got = dict(files.tensors())
        assert list(got) == sorted(expected)
        for tensor_name, tensor in got.items():
            assert_same_bits(tensor, expected[tensor_name], tensor_name)
    assert files.config["torch_dtype"] == {DType.FP32: "float32", DType.BF16: "bfloat16"}[storage]
    assert BIAS not in got or got[BIAS].dtype == torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert type(model).__name__ == {"qwen3_moe": "Qwen3MoeForCausalLM"}.get(family, "DeepseekV3ForCausalLM")
    model.save_pretrained(tmp_path / "theirs")
    back = open_model(tmp_path / "theirs")
    assert back.spec == spec
    for tensor_name, tensor in back.tensors():
        # transformers keeps this family's routers in FP32, so it writes them so; the values are the same.
        assert_same_bits(tensor.to(expected[tensor_name].dtype), expected.pop(tensor_name), tensor_name)
    assert not expected


@pytest.mark.parametrize("family", FAMILIES)
def test_stacked_experts_are_the_same_tensors(tmp_path, family):
    spec = tiny_spec(family)
    apart = write_random_model(tmp_path / "apart", spec)
    stacked = write_random_model(tmp_path / "stacked", spec)
    edit(stacked, lambda t: stack(t, spec))
    assert not [n for n in load_file(stacked / "model.safetensors") if ".experts.0." in n]
    ours, theirs = list(open_model(stacked).tensors()), list(open_model(apart).tensors())
    assert [name for name, _ in ours] == [name for name, _ in theirs]
    for (name, a), (_, b) in zip(ours, theirs, strict=True):
        assert_same_bits(a, b, name)


def test_stacks_are_cut_as_transformers_holds_them(tmp_path):
    """Its own tensors in memory, written as they are: gate's rows come before up's."""
    folder = write_random_model(tmp_path / "m", tiny_spec("qwen3_moe"), storage=DType.FP32)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    held = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    assert "model.layers.0.mlp.experts.gate_up_proj" in held
    save_file(held, tmp_path / "held.safetensors", metadata={"format": "pt"})
    expected = dict(open_model(folder).tensors())
    (tmp_path / "held.safetensors").rename(folder / "model.safetensors")
    for name, tensor in open_model(folder).tensors():
        assert_same_bits(tensor, expected.pop(name), name)
    assert not expected


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("changes", [{}, {"scale_format": "pow2"}, {"bf16_first": 1}])
def test_an_exported_fp8_model_loads_with_equal_digests(tmp_path, family, changes):
    spec = tiny_spec(family, hidden_size=144)  # blocks with ragged tails
    first = decoder(spec, "fp8", random_tensors(spec, seed=5), **changes)
    files = open_model(export(tmp_path / "fp8", first, 100_000))
    again = decoder(files.spec, "fp8", files.tensors(), **changes)
    assert again.digests() == first.digests() and files.spec == spec
    assert (files.source / "model.safetensors.index.json").exists()
    listed = files.config["quantization_config"]["modules_to_not_convert"]
    assert ROUTER.removesuffix(".weight") in listed and "model.layers.1.mlp.experts" not in listed
    assert (KV_B.removesuffix(".weight") in listed) == (family == "deepseek_v3")
    assert ("model.layers.0.mlp.experts" in listed) == (family == "qwen3_moe" and "bf16_first" in changes)
    stored = dict(files.tensors())
    assert isinstance(stored[EXPERT], BlockCodes) and stored[ROUTER].dtype == torch.bfloat16
    assert files.config["torch_dtype"] == "bfloat16"
    assert ModelSpec.from_hf(transformers.AutoConfig.from_pretrained(files.source).to_dict()) == spec


def test_stacked_fp8_experts_are_the_same_codes(tmp_path):
    moe = tiny_spec("qwen3_moe").moe
    for size, fits in ((128, True), (48, False)):  # 48 rows of gate and 48 of up would share a block
        spec = tiny_spec("qwen3_moe", moe=type(moe)(moe.routing, size))
        first = decoder(spec, "fp8", random_tensors(spec))
        folder = export(tmp_path / str(size), first)

        def change(tensors, spec=spec):
            stack(tensors, spec, "_scale_inv")
            stack(tensors, spec)

        edit(folder, change)
        if fits:
            assert decoder(spec, "fp8", open_model(folder).tensors()).digests() == first.digests()
        else:
            with pytest.raises(
                CheckpointError, match=r"gate_up_proj_scale_inv: a block of 128 rows lies in gate and up"
            ):
                open_model(folder)


def test_an_expansion_and_a_router_in_fp8_are_read_by_their_values(tmp_path):
    """DeepSeek-V3's own files hold kv_b_proj as codes; here it is never quantised."""
    spec = tiny_spec("deepseek_v3")
    tensors = dict(random_tensors(spec))
    for name in (KV_B, ROUTER):
        tensors[name] = BlockCodes(*quant.quantise_weight(tensors[name], "fp32"))
    files = open_model(save_folder(tmp_path / "m", spec, tensors.items()))
    model = decoder(files.spec, "fp8", files.tensors())
    for name in (KV_B, ROUTER):
        value = quant.dequantise(tensors[name].codes, tensors[name].scales)
        assert_same_bits(model.weights[name].value(), value.to(torch.bfloat16), name)


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_the_fp8_values_that_we_do(tmp_path, family):
    """On a CPU it dequantises; every element equals ours. (Its dequantiser takes whole blocks only.)"""
    pytest.importorskip("accelerate", reason="transformers wants accelerate to load FP8 models")
    spec = tiny_spec(family)
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_heads": 8, "num_kv_heads": 4}
    sizes["moe"] = dataclasses.replace(spec.moe, expert_size=128, shared_size=128 if spec.moe.shared_size else 0)
    if spec.mla is not None:
        heads = LatentSizes(8, 32, 16, 112, 32)
        sizes |= {"num_kv_heads": 8, "mla": dataclasses.replace(spec.mla, q_rank=128, sizes=heads)}
    spec = tiny_spec(family, **sizes)
    folder = export(tmp_path / "m", decoder(spec, "fp8", random_tensors(spec)))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    loaded = decoder(spec, "bf16", open_model(folder).tensors())
    ours = {name: handle.value() for name, handle in loaded.weights.items()}
    stack(ours, spec)
    for name, parameter in (*model.named_parameters(), *model.named_buffers()):
        if "rotary" not in name:
            value = ours.pop(name)
            assert_same_bits(parameter.to(value.dtype), value, name)
    assert not ours


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("weights", ["fp8", "bf16"])
def test_the_export_command(tmp_path, family, weights):
    """What it writes loads, under the contract that it names, with the digests that it names."""
    model = write_random_model(tmp_path / "model", tiny_spec(family, hidden_size=144))
    done = CliRunner().invoke(app, ["export", str(model), str(tmp_path / "out"), "--format", weights])
    assert done.exit_code == 0, done.exception
    files = open_model(tmp_path / "out")
    assert isinstance(dict(files.tensors())[EXPERT], BlockCodes) == (weights == "fp8")
    meta = json.loads((tmp_path / "out" / "zerogap.json").read_text())
    contract = Numerics.from_fields(meta["numerics"])
    assert Decoder(files.spec, contract, max_positions=64).load(files.tensors()).digests() == meta["digests"]


# ------------------------------------------------------------------------------------------------ buffers


@pytest.mark.parametrize("numerics", ["fp32", "bf16", "fp8"])
def test_a_buffer_keeps_its_fp32_bits_everywhere(tmp_path, numerics):
    spec = tiny_spec("deepseek_v3")
    tensors = dict(random_tensors(spec, storage=DType.FP32 if numerics == "fp32" else DType.BF16))
    exact = tensors[BIAS]
    assert not torch.equal(exact, exact.to(torch.bfloat16).float()), "a bias that BF16 holds would show nothing"
    model = decoder(spec, numerics, tensors.items())
    assert_same_bits(model.weights[BIAS].value(), exact)
    other = decoder(spec, "bf16", random_tensors(spec, seed=9))
    other.copy_from(model)
    assert_same_bits(other.weights[BIAS].value(), exact)
    saved = open_model(save_folder(tmp_path / "m", spec, ((n, h.stored()) for n, h in model.weights.items())))
    assert saved.config["torch_dtype"] == ("float32" if numerics == "fp32" else "bfloat16")
    again = decoder(spec, numerics, saved.tensors())
    assert again.digests() == model.digests()
    theirs = (
        transformers.AutoModelForCausalLM.from_pretrained(saved.source, dtype="auto") if numerics != "fp8" else None
    )
    assert theirs is None or torch.equal(dict(theirs.named_buffers())[BIAS], exact)
    bit = tensors[BIAS].view(torch.int32).clone()
    bit[0] ^= 1
    changed = decoder(spec, numerics, (tensors | {BIAS: bit.view(torch.float32)}).items())
    assert [n for n, d in changed.digests().items() if d != model.digests()[n]] == [BIAS]


def test_buffers_are_never_trained():
    model = decoder(tiny_spec("deepseek_v3"), "bf16", random_tensors(tiny_spec("deepseek_v3")))
    everything = set(model.weights) - {BIAS}
    assert set(model.set_trainable(["all"])) == everything
    last = model.set_trainable(["last:1"])
    assert set(last) == {n for n in everything if n.startswith("model.layers.1.")}
    assert ROUTER in last and EXPERT in last and KV_B in last
    with pytest.raises(ConfigError, match="e_score_correction_bias"):
        model.set_trainable(["*e_score_correction_bias"])


def test_input_gradients_are_enabled_stack_by_stack():
    spec = tiny_spec("qwen3_moe")
    model = decoder(spec, "bf16", random_tensors(spec))
    model.set_trainable(["model.layers.1.mlp.experts.2.down_proj.weight"])
    for name, handle in model.weights.items():
        if handle.stack is not None:
            assert (handle.stack.transposed is not None) == name.startswith("model.layers.1."), name
            assert (handle.transposed is not None) == name.startswith("model.layers.1."), name
    trained = [name for name, handle in model.weights.items() if handle.trainable]
    assert trained == ["model.layers.1.mlp.experts.2.down_proj.weight"]


# ------------------------------------------------------------------------------------------------ extra heads


def add_extra_heads(tensors, layer=2):
    for name in ("eh_proj.weight", "enorm.weight", "shared_head.head.weight", "mlp.experts.0.up_proj.weight"):
        tensors[f"model.layers.{layer}.{name}"] = torch.ones(4, dtype=torch.bfloat16)


def test_extra_prediction_heads_are_skipped_with_a_warning_that_names_them(tmp_path):
    spec = tiny_spec("deepseek_v3")
    folder = write_random_model(tmp_path / "m", spec)
    expected = dict(open_model(folder).tensors())
    edit(folder, add_extra_heads)
    with pytest.raises(CheckpointError, match=r"unexpected: model\.layers\.2\.eh_proj\.weight"):
        open_model(folder)  # config.json says that there are none
    edit_config(folder, num_nextn_predict_layers=1)
    with pytest.warns(
        UserWarning, match=r"4 tensors of extra prediction heads are skipped.*layers\.2\.eh_proj\.weight"
    ):
        files = open_model(folder)
    assert files.spec == spec
    for name, tensor in files.tensors():
        assert_same_bits(tensor, expected.pop(name), name)
    assert not expected
    copy = save_folder(tmp_path / "copy", files.spec, files.tensors(), files)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert open_model(copy).spec == spec
    assert json.loads((copy / "config.json").read_text())["num_nextn_predict_layers"] == 0
    edit(folder, lambda t: add_extra_heads(t, layer=3))
    with pytest.raises(CheckpointError, match=r"unexpected: model\.layers\.3\.eh_proj\.weight"):
        open_model(folder)  # one layer was announced


# ------------------------------------------------------------------------------------------------ refusals


def drop(name):
    return lambda tensors: tensors.pop(name)


def transpose_stack(tensors):
    stack(tensors, tiny_spec("qwen3_moe"))
    name = "model.layers.1.mlp.experts.gate_up_proj"
    tensors[name] = tensors[name].transpose(1, 2)


def both(tensors):
    kept = tensors["model.layers.0.mlp.experts.4.up_proj.weight"].clone()
    stack(tensors, tiny_spec("qwen3_moe"))
    tensors["model.layers.0.mlp.experts.4.up_proj.weight"] = kept


def one_expert_more(tensors):
    tensors["model.layers.1.mlp.experts.6.up_proj.weight"] = tensors["model.layers.1.mlp.experts.5.up_proj.weight"] + 1


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (drop("model.layers.1.mlp.experts.5.down_proj.weight"), r"missing: .*layers\.1\.mlp\.experts\.5\.down_proj"),
        (drop(ROUTER), r"missing: model\.layers\.1\.mlp\.gate\.weight"),
        (one_expert_more, r"unexpected: model\.layers\.1\.mlp\.experts\.6\.up_proj\.weight"),
        (transpose_stack, r"gate_up_proj is \[6, 128, 96\], config\.json implies \[6, 96, 128\]"),
        (both, r"experts\.4\.up_proj\.weight is there, and in model\.layers\.0\.mlp\.experts\.gate_up_proj, too"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, fault, message):
    changes = {"hidden_size": 128} if fault is transpose_stack else {}
    folder = write_random_model(tmp_path / "m", tiny_spec("qwen3_moe", **changes))
    edit(folder, fault)
    with pytest.raises(CheckpointError, match=message):
        open_model(folder)
