"""GGUF files: names, row order, de-quantisation, config from metadata, and refusals."""

import gguf
import numpy as np
import pytest
import torch
import transformers

from tests.bits import assert_same_bits
from tests.models_on_disk import quick_start_files, small_tokenizer, tiny_spec, write_gguf
from zerogap.errors import CheckpointError, ConfigError
from zerogap.numerics import DType
from zerogap.weights import open_model, save_folder
from zerogap.weights.random_model import random_tensors

FAMILIES = ["llama", "qwen2", "qwen3"]
EXACT = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", EXACT)
def test_unquantised_tensors_come_back_in_hugging_face_order(tmp_path, family, tied, kind):
    spec = tiny_spec(family, tied)
    files = open_model(write_gguf(tmp_path / "m.gguf", spec, kind))
    assert files.spec == tiny_spec(family, tied, eos_token_ids=(), bos_token_id=None)
    expected = dict(random_tensors(spec, storage=DType.FP32))
    got = list(files.tensors())
    assert [name for name, _ in got] == sorted(expected)
    for name, tensor in got:
        dtype = torch.float32 if tensor.ndim == 1 else EXACT[kind]
        assert_same_bits(tensor, expected[name].to(dtype), name)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_quantised_blocks_are_the_written_formula_rounded_once(tmp_path, kind):
    """Q8_0: 32 values, FP16 d, d * q. Q4_1: 32 values, FP16 d and m, low nibbles first, d * q + m."""
    spec = tiny_spec("qwen3")
    files = open_model(write_gguf(tmp_path / "m.gguf", spec, kind))
    raw = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}["blk.1.ffn_up.weight"].data
    blocks = np.array(raw).reshape(-1, {"Q8_0": 34, "Q4_1": 20}[kind])
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    if kind == "Q8_0":
        values = scale * blocks[:, 2:].copy().view(np.int8)
    else:
        offset = blocks[:, 2:4].copy().view(np.float16).astype(np.float32)
        values = scale * np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1) + offset
    got = dict(files.tensors())["model.layers.1.mlp.up_proj.weight"]
    assert_same_bits(got, torch.from_numpy(values.astype(np.float32)).view(160, 96).to(torch.bfloat16), kind)
    original = dict(random_tensors(spec, storage=DType.FP32))["model.layers.1.mlp.up_proj.weight"]
    step = float(scale.max()) * (0.5 if kind == "Q8_0" else 0.6)  # half a step, the rounding of d and m, and BF16's
    assert (got.float() - original).abs().max() <= step + original.abs().max() * 2**-8


def test_special_ids_come_from_the_metadata(tmp_path):
    files = open_model(write_gguf(tmp_path / "m.gguf", tiny_spec("llama"), tokenizer=small_tokenizer()))
    assert (files.spec.bos_token_id, files.spec.eos_token_ids, files.spec.pad_token_id) == (0, (1, 2), None)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"pre": "tekken"}, ConfigError, r"tokenizer\.ggml\.pre = 'tekken'"),
        ({"model": "llama"}, ConfigError, r"tokenizer\.ggml\.model = 'llama'"),
        ({"token_type": [1, 1]}, CheckpointError, "2 token types"),
        ({"eos_token_id": 4000}, CheckpointError, "eos_token_id 4000 is outside"),
    ],
)
def test_an_unknown_or_broken_tokenizer_is_refused(tmp_path, changes, error, message):
    files = open_model(write_gguf(tmp_path / "m.gguf", tiny_spec("llama"), tokenizer=small_tokenizer(**changes)))
    with pytest.raises(error, match=message):
        files.tokenizer_files()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"llama.rope.scaling.type": "yarn"}, ConfigError, r"rope\.scaling\.type = 'yarn'"),
        ({"llama.rope.dimension_count": 16}, ConfigError, "dimension_count = 16"),
        ({"llama.rope.freq_base": None}, CheckpointError, r"rope\.freq_base is missing"),
        ({"llama.attention.head_count_kv": None}, CheckpointError, "head_count_kv is missing"),
        ({"llama.feed_forward_length": 128}, CheckpointError, r"gate_proj\.weight is \[160, 96\]"),
        ({"llama.block_count": 3}, CheckpointError, r"missing: model\.layers\.2"),
        ({"llama.block_count": 1}, CheckpointError, r"unexpected: model\.layers\.1"),
    ],
)
def test_metadata_that_cannot_be_honoured_is_refused(tmp_path, change, error, message):
    with pytest.raises(error, match=message):
        open_model(write_gguf(tmp_path / "m.gguf", tiny_spec("llama"), change=change))


def test_a_foreign_architecture_is_refused(tmp_path):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "gemma")
    writer.add_tensor("token_embd.weight", np.ones((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"general\.architecture = 'gemma'"):
        open_model(path)


def test_an_unread_quantisation_is_refused_by_tensor(tmp_path):
    with pytest.raises(ConfigError, match=r"Q5_0.*use a file of"):
        open_model(write_gguf(tmp_path / "m.gguf", tiny_spec("llama"), "Q5_0"))


@pytest.mark.parametrize("part", [0.0, 0.0001, 0.001, 0.3, 0.9999])
def test_a_truncated_file_is_named(tmp_path, part):
    path = write_gguf(tmp_path / "m.gguf", tiny_spec("llama"), tokenizer=small_tokenizer())
    content = path.read_bytes()
    path.write_bytes(content[: int(part * len(content))])
    with pytest.raises(CheckpointError, match=r"m\.gguf"):
        open_model(path)


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"PK\x03\x04" * 100)
    with pytest.raises(CheckpointError, match="not a whole GGUF file"):
        open_model(tmp_path / "m.gguf")
    (tmp_path / "m.bin").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"give a folder, a \.gguf file"):
        open_model(tmp_path / "m.bin")


def test_quick_start_model_and_its_export(tmp_path):
    files = quick_start_files()
    spec = files.spec
    assert (spec.num_layers, spec.hidden_size, spec.num_heads, spec.num_kv_heads) == (30, 576, 9, 3)
    assert (spec.norm_eps, spec.rope.theta, spec.tied, spec.vocab_size) == (1e-5, 100000.0, True, 49152)
    assert (spec.eos_token_ids, spec.bos_token_id) == ((2,), 1)
    folder = save_folder(tmp_path / "smol", spec, ((n, t.to(torch.bfloat16)) for n, t in files.tensors()), files)
    copy = open_model(folder)
    assert copy.spec == spec and copy.chat_template == files.chat_template and copy.config["dtype"] == "bfloat16"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer("Spain has Madrid. The capital of France is", return_tensors="pt")
    with torch.no_grad():
        answer = model(**inputs).logits[0, -1].argmax()
    assert tokenizer.decode(answer) == " Paris"  # permuted rows or wrong blocks would give noise
