"""Block-FP8 checkpoints: exported, read back with equal digests, read by transformers, and refused where they lie."""

import json

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
from zerogap.numerics import preset
from zerogap.ops import quant
from zerogap.types import BlockCodes
from zerogap.weights import open_model, save_folder
from zerogap.weights.random_model import random_tensors, write_random_model

UP = "model.layers.1.mlp.up_proj.weight"
SIZES = {"hidden_size": 144, "intermediate_size": 320}  # blocks with ragged tails both ways


def decoder(spec, numerics, tensors):
    return Decoder(spec, numerics, max_positions=64).load(tensors)


def export(path, model, max_shard_bytes=1 << 30):
    tensors = ((n, h.codes() if h.spec.fp8 else h.value()) for n, h in model.weights.items())
    return save_folder(path, model.spec, tensors, max_shard_bytes=max_shard_bytes)


def edit(folder, change):
    """Change the tensors of a one-file model."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def edit_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


@pytest.fixture
def folder(tmp_path):
    spec = tiny_spec("llama", **SIZES)
    return export(tmp_path / "fp8", decoder(spec, preset("fp8"), random_tensors(spec)))


# ------------------------------------------------------------------------------------------------ there and back


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scale_format", ["fp32", "pow2"])
def test_an_exported_model_loads_with_equal_digests(tmp_path, family, tied, scale_format):
    spec = tiny_spec(family, tied, **SIZES)
    numerics = preset("fp8", scale_format=scale_format, bf16_first=1)
    first = decoder(spec, numerics, random_tensors(spec, seed=5))
    for name, shard_bytes in (("whole", 1 << 30), ("shards", 100_000)):
        files = open_model(export(tmp_path / name, first, shard_bytes))
        assert (files.source / "model.safetensors.index.json").exists() == (name == "shards")
        again = decoder(files.spec, numerics, files.tensors())
        assert again.digests() == first.digests() and files.spec == spec
        for ours, theirs in zip(again.weights.values(), first.weights.values(), strict=True):
            for form in ("panels", "scales", "rows"):
                if getattr(ours, form) is not None:
                    assert_same_bits(getattr(ours, form), getattr(theirs, form), f"{ours.spec.name}: {form}")
    listed = files.config["quantization_config"]["modules_to_not_convert"]
    assert "lm_head" in listed, "a linear layer to a loader, tied or not"
    second = export(tmp_path / "second", again)  # from codes, without a published value
    assert decoder(spec, numerics, open_model(second).tensors()).digests() == first.digests()


def test_what_the_decoder_stores_loads_with_equal_digests(tmp_path, folder):
    """A model that came as codes is kept as codes; one that was trained, as its published values."""
    spec, numerics = open_model(folder).spec, preset("fp8")
    model = decoder(spec, numerics, open_model(folder).tensors())
    for name in ("brought", "trained"):
        if name == "trained":
            model.set_trainable(["last:1"])
            model.weights[UP].master.mul_(1.01)
            model.weights[UP].publish()
        saved = save_folder(tmp_path / name, spec, ((n, h.stored()) for n, h in model.weights.items()))
        assert decoder(spec, numerics, open_model(saved).tensors()).digests() == model.digests(), name
    assert not isinstance(model.weights[UP].stored(), BlockCodes)
    listed = json.loads((saved / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert UP.removesuffix(".weight") in listed and "model.layers.0.mlp.up_proj" not in listed


@pytest.mark.parametrize("numerics", ["bf16", "fp32"])
def test_another_contract_reads_the_values_of_the_codes(folder, numerics):
    files = open_model(folder)
    model = decoder(files.spec, preset(numerics), files.tensors())
    for name, tensor in files.tensors():
        if isinstance(tensor, BlockCodes):
            tensor = quant.dequantise(tensor.codes, tensor.scales)
        assert_same_bits(model.weights[name].value(), tensor.to(model.weights[name].storage), name)


def test_the_same_codes_are_quantised_anew_where_the_contract_wants_other_scales(folder):
    files = open_model(folder)
    model = decoder(files.spec, preset("fp8", scale_format="pow2"), files.tensors())
    for name, tensor in files.tensors():
        if isinstance(tensor, BlockCodes):
            codes, scales = quant.quantise_weight(quant.dequantise(tensor.codes, tensor.scales), "pow2")
            assert_same_bits(model.weights[name].codes().codes, codes, name)
            assert_same_bits(model.weights[name].scales, scales, name)


def test_scales_stored_in_bf16_are_read(folder):
    """As some Qwen3 models have them."""
    edit(folder, lambda t: t.update({n: s.to(torch.bfloat16) for n, s in t.items() if n.endswith("_scale_inv")}))
    files = open_model(folder)
    model = decoder(files.spec, preset("fp8"), files.tensors())
    assert_same_bits(model.weights[UP].scales, load_file(folder / "model.safetensors")[UP + "_scale_inv"].float())


def test_a_bf16_copy_of_an_fp8_model_says_nothing_of_quantisation(tmp_path, folder):
    files = open_model(folder)
    model = decoder(files.spec, preset("bf16"), files.tensors())
    copy = save_folder(tmp_path / "bf16", files.spec, ((n, h.value()) for n, h in model.weights.items()), files)
    assert "quantization_config" not in json.loads((copy / "config.json").read_text())
    assert not any(isinstance(tensor, BlockCodes) for _, tensor in open_model(copy).tensors())


# ------------------------------------------------------------------------------------------------ what is written


def test_the_folder_is_as_deepseek_and_qwen_have_it(tmp_path):
    spec = tiny_spec("llama", **SIZES)
    numerics = preset("fp8", bf16_last=1, bf16_tensors=("mlp.gate", "k_proj"))
    with pytest.raises(ConfigError, match=r"bf16_layers.*mlp\.gate"):
        spec.weight_specs(numerics)  # no tensor of this model is called so: gate_proj is another
    numerics = preset("fp8", bf16_last=1, bf16_tensors=("k_proj",))
    path = export(tmp_path / "m", decoder(spec, numerics, random_tensors(spec)))
    config = json.loads((path / "config.json").read_text())
    kinds = ["mlp.down_proj", "mlp.gate_proj", "mlp.up_proj", "self_attn.k_proj"]
    kinds += ["self_attn.o_proj", "self_attn.q_proj", "self_attn.v_proj"]
    kept = ["model.layers.0.self_attn.k_proj", *[f"model.layers.1.{kind}" for kind in kinds]]
    assert config["quantization_config"] == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": sorted(["lm_head", *kept]),
    }
    assert config["torch_dtype"] == "bfloat16"
    stored = load_file(path / "model.safetensors")
    quantised = {n for n, t in stored.items() if t.dtype == torch.float8_e4m3fn}
    assert quantised == {f"model.layers.0.{kind}.weight" for kind in kinds if "k_proj" not in kind}
    assert {n for n in stored if n.endswith("_scale_inv")} == {n + "_scale_inv" for n in quantised}
    for name in quantised:
        n, k = stored[name].shape
        scales = stored[name + "_scale_inv"]
        assert scales.dtype == torch.float32 and scales.shape == (-(-n // 128), -(-k // 128))
    assert all(t.dtype == torch.bfloat16 for n, t in stored.items() if n not in quantised and "_scale_inv" not in n)


def test_transformers_reads_the_config(folder):
    config = transformers.AutoConfig.from_pretrained(folder)
    theirs = config.quantization_config
    assert theirs["quant_method"] == "fp8" and theirs["weight_block_size"] == [128, 128]
    assert ModelSpec.from_hf(config.to_dict()) == open_model(folder).spec


def test_transformers_config_class_reads_and_writes_what_we_do(folder):
    given = json.loads((folder / "config.json").read_text())["quantization_config"]
    theirs = transformers.FineGrainedFP8Config(**given)
    assert (theirs.activation_scheme, list(theirs.weight_block_size)) == ("dynamic", [128, 128])
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": theirs.to_dict()}
    assert ModelSpec.from_hf(config) == open_model(folder).spec


def test_transformers_loads_the_values_that_we_do(tmp_path):
    """On a CPU it dequantises; every element equals ours. (Its dequantiser takes whole blocks only.)"""
    pytest.importorskip("accelerate", reason="transformers wants accelerate to load FP8 models")
    spec = tiny_spec("llama", hidden_size=256, intermediate_size=384, num_heads=8, num_kv_heads=4)
    folder = export(tmp_path / "m", decoder(spec, preset("fp8", bf16_first=1), random_tensors(spec)))
    theirs = dict(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).named_parameters())
    for name, handle in decoder(spec, preset("bf16"), open_model(folder).tensors()).weights.items():
        assert_same_bits(theirs.pop(name), handle.value(), name)
    assert not theirs


@pytest.mark.parametrize(
    ("words", "stored", "has_codes"),
    [
        (["--format", "fp8"], "fp8", True),
        (["--format", "fp8", "--numerics", "{preset: fp8, scale_format: pow2}"], "fp8", True),
        (["--numerics", "fp8"], "bf16", False),
        (["--format", "bf16"], "bf16", False),
        (["--format", "fp32"], "fp32", False),
        ([], "bf16", False),
    ],
)
def test_the_export_command(tmp_path, words, stored, has_codes):
    spec = tiny_spec("qwen3", **SIZES)
    model = write_random_model(tmp_path / "model", spec)
    done = CliRunner().invoke(app, ["export", str(model), str(tmp_path / "out"), *words])
    assert done.exit_code == 0, done.exception
    assert done.output.rstrip().endswith(stored)
    files = open_model(tmp_path / "out")
    tensors = dict(files.tensors())
    assert isinstance(tensors[UP], BlockCodes) == has_codes
    meta = json.loads((tmp_path / "out" / "zerogap.json").read_text())
    contract = preset("bf16").from_fields(meta["numerics"])
    assert decoder(files.spec, contract, tensors.items()).digests() == meta["digests"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--format", "int8"], "format = 'int8': choose one of fp32, bf16, fp8"),
        (["--format", "fp8", "--numerics", "bf16"], "format = 'fp8': numerics bf16 quantises nothing"),
        (["--format", "fp32", "--numerics", "fp8"], "format = 'fp32': numerics fp8 publishes bf16"),
    ],
)
def test_a_format_that_the_contract_does_not_publish_is_refused_before_the_model_is_opened(tmp_path, words, message):
    done = CliRunner().invoke(app, ["export", str(tmp_path / "no-model"), str(tmp_path / "out"), *words])
    assert isinstance(done.exception, ConfigError) and message in str(done.exception)


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"quant_method": "awq"}, "quant_method = 'awq'"),
        ({"weight_block_size": [64, 128]}, "weight_block_size = [64, 128]"),
        ({"weight_block_size": None}, "weight_block_size = None"),
        ({"activation_scheme": "static"}, "activation_scheme = 'static'"),
        ({"fmt": "e5m2"}, "fmt = 'e5m2'"),
        ({"scale_fmt": "mx"}, "scale_fmt = 'mx'"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme = {'num_bits': 8}"),
    ],
)
def test_other_quantisations_are_refused_by_key_value_and_mend(folder, change, key):
    edit_config(folder, **change)
    with pytest.raises(ConfigError, match=r"use that checkpoint of the model, or the unquantised one") as error:
        open_model(folder)
    assert str(error.value).startswith(f"config.quantization_config.{key}: ")


@pytest.mark.parametrize("change", [{"scale_fmt": "ue8m0"}, {"scale_fmt": None}, {"fmt": None}, {"ignored_layers": []}])
def test_spellings_of_the_same_quantisation_are_read(folder, change):
    edit_config(folder, **change)
    open_model(folder)


def cut_scales(tensors):
    del tensors[UP + "_scale_inv"]


def lonely_scales(tensors):
    tensors[UP] = tensors[UP].to(torch.bfloat16)


def short_scales(tensors):
    tensors[UP + "_scale_inv"] = tensors[UP + "_scale_inv"][:2]


def integer_scales(tensors):
    tensors[UP + "_scale_inv"] = tensors[UP + "_scale_inv"].to(torch.float16)


def a_vector(tensors):
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (cut_scales, r"up_proj\.weight is F8_E4M3, and its scales .*up_proj\.weight_scale_inv are missing"),
        (lonely_scales, r"up_proj\.weight_scale_inv has no F8_E4M3 tensor"),
        (short_scales, r"up_proj\.weight_scale_inv is F32 \[2, 2\]; blocks of 128 x 128 need F32 \[3, 2\]"),
        (integer_scales, r"up_proj\.weight_scale_inv is F16"),
        (a_vector, r"model\.norm\.weight is F8_E4M3 of shape \[144\], not a matrix"),
    ],
)
def test_codes_and_scales_that_do_not_fit_are_named_when_the_model_is_opened(folder, fault, message):
    edit(folder, fault)
    with pytest.raises(CheckpointError, match=message):
        open_model(folder)


def test_codes_without_a_quantization_config_are_refused(folder):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"is F8_E4M3, but config\.json has no quantization_config"):
        open_model(folder)


def test_numbers_that_are_none_are_refused_when_they_are_loaded(folder):
    for value in (float("nan"), 0.0, -1.0):
        edit(folder, lambda t, value=value: t[UP + "_scale_inv"].fill_(value))
        files = open_model(folder)
        for numerics in ("fp8", "bf16"):
            with pytest.raises(CheckpointError, match=rf"{UP}: a scale is not a positive number"):
                decoder(files.spec, preset(numerics), files.tensors())
