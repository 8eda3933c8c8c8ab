"""`zerogap inspect` and the `--numerics` option: what is printed and written, from headers alone."""

import json
import re

import pytest
import torch
from typer.testing import CliRunner

from tests.models_on_disk import quick_start_path, small_tokenizer, tiny_spec, write_gguf
from zerogap.cli import app
from zerogap.cli.inspect import as_bytes
from zerogap.cli.numerics_option import contract_from
from zerogap.errors import ConfigError
from zerogap.models.inventory import inventory
from zerogap.models.words import ranges
from zerogap.numerics import PRESETS, preset
from zerogap.weights.random_model import write_random_model


def inspected(*words):
    done = CliRunner().invoke(app, ["inspect", *map(str, words)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0
    return done.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_random_model(tmp_path_factory.mktemp("inspect") / "model", tiny_spec("qwen3", num_layers=12))


def test_the_complete_list_is_printed_and_written(folder, tmp_path):
    text = "{preset: fp8-kv, bf16_layers: {first: 1, tensors: [mlp.down_proj]}}"
    out = inspected(folder, "--numerics", text, "--all", "--json", tmp_path / "facts.json")
    contract = preset("fp8-kv", bf16_first=1, bf16_tensors=["mlp.down_proj"])
    forms = inventory(tiny_spec("qwen3", num_layers=12), contract)
    before, after = out.split("Stays BF16")
    assert re.findall(r"^model\.\S+", before.split("Quantised")[1], re.MULTILINE) == [
        f.name for f in forms if f.quantised
    ]
    assert re.findall(r"^(?:model|lm_head)\.\S+", after, re.MULTILINE) == [f.name for f in forms if not f.quantised]
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts["quantised"] == [f.name for f in forms if f.quantised]
    assert [t["name"] for t in facts["tensors"]] == [f.name for f in forms]
    assert (facts["fingerprint"], facts["numerics"]) == (contract.fingerprint(), contract.fields())
    assert facts["weight_bytes"] == sum(t["bytes"] for t in facts["tensors"]) < facts["plain_weight_bytes"]
    assert facts["kv_bytes_per_token"] == {"keys_and_values": 12 * 2 * 2 * 32, "scales": 12 * 2 * 2 * 4}


def test_equal_layers_share_a_line(folder):
    out = inspected(folder, "--numerics", "{preset: fp8, bf16_layers: {first: 1, last: 1}}")
    assert "mlp.gate_proj, layers 1-10" in out
    assert "mlp.gate_proj, layer 0 " in out and "option: first 1" in out and "option: last 1" in out
    assert "input_layernorm, layers 0-11" in out
    for key, value in preset("fp8").fields().items():
        assert key == "name" or f"{key} {value or 'none'}" in " ".join(out.split()) or key.startswith("bf16_")


@pytest.mark.parametrize("numerics", PRESETS)
def test_every_preset_and_no_weights_are_read(folder, numerics, monkeypatch):
    """Headers only: not one tensor is asked for."""
    monkeypatch.setattr("zerogap.weights.folder.FolderFiles.tensors", lambda self: pytest.fail("weights are read"))
    out = inspected(folder, "--numerics", numerics)
    assert PRESETS[numerics].fingerprint() in out
    assert ("Quantised" in out) == numerics.startswith("fp8")


def test_gguf_files_and_the_quick_start_model(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", tiny_spec("llama"), tokenizer=small_tokenizer())
    assert "Quantised: 14 tensors" in inspected(path, "--numerics", "fp8")
    out = inspected(quick_start_path(), "--numerics", "fp8")
    assert "Quantised: 210 tensors, 106,168,320 parameters" in out
    assert "134,515,008 parameters" in out
    assert "embedding, also the head" in out


def test_a_block_fp8_folder_says_what_becomes_of_its_codes(folder, tmp_path):
    done = CliRunner().invoke(app, ["export", str(folder), str(tmp_path / "fp8"), "--format", "fp8"])
    assert done.exit_code == 0, done.output
    out = " ".join(inspected(tmp_path / "fp8", "--numerics", "fp8", "--json", tmp_path / "facts.json").split())
    assert "84 tensors are stored in block-FP8; the codes of 84 are taken over" in out and "de-quantised" not in out
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert sorted(facts["quantised"]) == facts["stored_codes"]
    out = " ".join(inspected(tmp_path / "fp8", "--numerics", "{preset: fp8, bf16_layers: {last: 3}}").split())
    assert "the codes of 63 are taken over" in out and "21 are de-quantised" in out
    out = " ".join(inspected(tmp_path / "fp8").split())
    assert "84 tensors are stored in block-FP8; 84 are de-quantised" in out
    assert "stored in block-FP8" not in inspected(folder, "--numerics", "fp8")


def test_ranges_and_bytes_in_words():
    assert ranges([3, 0, 1, 2, 7, 9, 10]) == "0-3, 7, 9-10"
    assert ranges([]) == ""
    sizes = (5, 1023, 1024, 1536, 10240, 2**20 * 100)
    assert list(map(as_bytes, sizes)) == ["5 B", "1,023 B", "1.00 KiB", "1.50 KiB", "10.0 KiB", "100 MiB"]


def test_the_option_reads_what_a_recipe_reads():
    assert contract_from("fp8-kv") == PRESETS["fp8-kv"]
    text = "{preset: fp8-kv, kv_scale: calibrated, bf16_layers: {first: 1, last: 1}}"
    assert contract_from(text) == preset("fp8-kv", kv_scale="calibrated", bf16_first=1, bf16_last=1)


@pytest.mark.parametrize("command", ["verify", "generate", "inspect", "export"])
@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("fp16", ["fp16", "fp32, bf16, fp8, fp8-kv"]),
        ("8", ["--numerics", "give a preset"]),
        ("[fp8]", ["--numerics", "give a preset"]),
        ("{preset: fp8", ["not valid YAML"]),
        ("{preset: fp8, preset: bf16}", ["twice"]),
        ("{preset: fp8, scale: pow2}", ["numerics.scale", "no such field", "scale_format"]),
        ("{preset: fp8, colour: red}", ["numerics.colour", "no such field; there are name, storage, linear"]),
        ("{preset: fp8, scale_format: e8m0}", ["numerics.scale_format", "fp32 or pow2"]),
        ("{preset: bf16, rollout: fp8}", ["--numerics", "only a recipe", "rollout.numerics"]),
    ],
)
def test_wrong_numerics_are_refused_before_a_model_is_opened(command, text, parts, tmp_path):
    words = {"generate": ["--prompt", "a"], "export": [str(tmp_path / "out")]}.get(command, [])
    done = CliRunner().invoke(app, [command, str(tmp_path / "no-model"), *words, "--numerics", text])
    assert isinstance(done.exception, ConfigError)
    for part in parts:
        assert part in str(done.exception)


def test_torch_threads_are_left_alone(folder):
    before = torch.get_num_threads()
    inspected(folder)
    assert torch.get_num_threads() == before
