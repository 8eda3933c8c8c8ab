"""Hugging Face folders: what is written is read back bit by bit, what is broken is refused by name."""

import json
import struct

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.bits import assert_same_bits
from tests.models_on_disk import LLAMA3_ROPE, tiny_spec
from zerogap.errors import CheckpointError, ConfigError
from zerogap.numerics import DType
from zerogap.weights import open_model, sampling_defaults_notice, save_folder
from zerogap.weights.random_model import random_tensors, write_random_model

FAMILIES = ["llama", "qwen2", "qwen3"]


def edit_json(path, **changes):
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({k: v for k, v in (content | changes).items() if v is not Ellipsis}))


def rewrite_tensors(folder, edit):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("storage", [DType.FP32, DType.BF16])
def test_round_trip_keeps_every_bit_in_one_file_and_in_shards(tmp_path, family, tied, storage):
    spec = tiny_spec(family, tied, rope=LLAMA3_ROPE, eos_token_ids=(2, 7, 9))
    expected = dict(random_tensors(spec, seed=3, storage=storage))
    for name, shard_bytes in (("whole", 1 << 30), ("shards", 100_000)):
        folder = write_random_model(tmp_path / name, spec, seed=3, storage=storage, max_shard_bytes=shard_bytes)
        assert (folder / "model.safetensors.index.json").exists() == (name == "shards")
        files = open_model(folder)
        assert files.spec == spec
        got = list(files.tensors())
        assert [n for n, _ in got] == sorted(expected)
        for tensor_name, tensor in got:
            assert_same_bits(tensor, expected[tensor_name], tensor_name)
        assert files.tokenizer_files() == {} and files.chat_template is None


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_loads_the_saved_folder(tmp_path, family, tied):
    spec = tiny_spec(family, tied, rope=LLAMA3_ROPE)
    folder = write_random_model(tmp_path / "model", spec, storage=DType.FP32, max_shard_bytes=200_000)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert type(model).__name__.lower() == f"{family}forcausallm" and model.dtype == torch.float32
    assert model.config.rope_parameters["rope_type"] == "llama3"
    theirs = dict(model.named_parameters())
    for name, tensor in open_model(folder).tensors():
        assert_same_bits(theirs.pop(name), tensor, name)
    assert not theirs


def test_we_load_what_transformers_saves(tmp_path):
    config = transformers.Qwen3Config(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, vocab_size=320, tie_word_embeddings=True, max_position_embeddings=256, eos_token_id=[3, 4],
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    files = open_model(tmp_path)
    theirs = dict(model.named_parameters())
    for name, tensor in files.tensors():
        assert_same_bits(tensor, theirs.pop(name), name)
    assert not theirs and files.spec.eos_token_ids == (3, 4)


def test_a_tied_head_in_the_file_is_skipped_and_derived_buffers_too(tmp_path):
    folder = write_random_model(tmp_path / "m", tiny_spec("llama", tied=True))
    rewrite_tensors(
        folder,
        lambda t: t.update(
            {
                "lm_head.weight": t["model.embed_tokens.weight"].clone(),
                "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16),
            }
        ),
    )
    names = [name for name, _ in open_model(folder).tensors()]
    assert "lm_head.weight" not in names and not [n for n in names if "inv_freq" in n]


def test_eos_ids_are_the_union_and_sampling_defaults_are_named_not_applied(tmp_path):
    folder = write_random_model(tmp_path / "m", tiny_spec("llama", eos_token_ids=(2, 7)))
    (folder / "generation_config.json").unlink()
    assert sampling_defaults_notice(open_model(folder)) is None
    edit_json(
        folder / "generation_config.json",
        eos_token_id=[9, 7],
        repetition_penalty=1.3,
        top_k=3,
        temperature=None,
        do_sample=True,
        transformers_version="4.0",
    )
    files = open_model(folder)
    assert files.spec.eos_token_ids == (2, 7, 9)
    notice = sampling_defaults_notice(files)
    assert str(folder / "generation_config.json") in notice
    assert "repetition_penalty = 1.3" in notice and "top_k = 3" in notice and "do_sample = True" in notice
    assert "temperature" not in notice and "eos_token_id" not in notice and "transformers_version" not in notice
    edit_json(folder / "generation_config.json", **dict.fromkeys(("repetition_penalty", "top_k", "do_sample"), ...))
    assert sampling_defaults_notice(open_model(folder)) is None


@pytest.mark.parametrize("keep", [0, 5, 1000, -1])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_truncated_file_is_named(tmp_path, keep, sharded):
    folder = write_random_model(tmp_path / "m", tiny_spec("llama"), max_shard_bytes=100_000 if sharded else 1 << 30)
    victim = sorted(folder.glob("*.safetensors"))[-1]
    victim.write_bytes(victim.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=victim.name):
        open_model(folder)


def test_a_corrupt_header_is_named(tmp_path):
    folder = write_random_model(tmp_path / "m", tiny_spec("llama"))
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[:8] = struct.pack("<Q", 1 << 40)
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*corrupt"):
        open_model(folder)


def pop_norm(tensors):
    del tensors["model.norm.weight"]


def add_bias(tensors):
    tensors["model.layers.1.self_attn.q_proj.bias"] = torch.ones(192)


def wrong_shape(tensors):
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.ones(96, 160)


def wrong_dtype(tensors):
    tensors["model.norm.weight"] = torch.ones(96, dtype=torch.float64)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (pop_norm, r"missing: model\.norm\.weight"),
        (add_bias, r"unexpected: model\.layers\.1\.self_attn\.q_proj\.bias"),
        (wrong_shape, r"model\.layers\.0\.mlp\.up_proj\.weight is \[96, 160\], config\.json implies \[160, 96\]"),
        (wrong_dtype, r"model\.norm\.weight is F64"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, edit, message):
    folder = write_random_model(tmp_path / "m", tiny_spec("llama"))
    rewrite_tensors(folder, edit)
    with pytest.raises(CheckpointError, match=message):
        open_model(folder)


def test_an_untied_model_without_its_head_is_refused(tmp_path):
    folder = write_random_model(tmp_path / "m", tiny_spec("llama", tied=True))
    edit_json(folder / "config.json", tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"missing: lm_head\.weight"):
        open_model(folder)


def test_index_faults_are_named(tmp_path):
    folder = write_random_model(tmp_path / "m", tiny_spec("llama"), max_shard_bytes=100_000)
    index = folder / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    first = sorted(folder.glob("model-*.safetensors"))[0]
    absent = good["weight_map"] | {"model.norm.weight": first.name}
    for weight_map, message in (
        (absent, r"says that it holds model\.norm\.weight"),
        (good["weight_map"] | {"model.norm.weight": "model-9.safetensors"}, r"model-9\.safetensors: listed in"),
        (good["weight_map"] | {"model.norm.weight": "../m/" + first.name}, "not a plain file name"),
        (None, "no weight_map"),
    ):
        edit_json(index, weight_map=weight_map)
        with pytest.raises(CheckpointError, match=message):
            open_model(folder)


def test_pickles_are_never_read(tmp_path):
    folder = write_random_model(tmp_path / "m", tiny_spec("llama"))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is a pickle"):
        open_model(folder)


def test_broken_json_is_named(tmp_path):
    folder = write_random_model(tmp_path / "m", tiny_spec("llama"))
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"generation_config\.json: not valid JSON"):
        open_model(folder)
    (folder / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match=r"config\.json: holds a list"):
        open_model(folder)


@pytest.mark.parametrize("source", ["no/such/folder/here", "./nowhere", "missing.gguf", "a b"])
def test_a_source_that_is_nothing_is_refused(source):
    with pytest.raises(ConfigError, match="no such folder"):
        open_model(source)


def test_a_hub_id_that_cannot_be_reached_is_refused_with_a_mend():
    with pytest.raises(ConfigError, match="hub could not be used"):
        open_model("nobody/no-such-model")


def test_save_replaces_a_model_folder_only_when_the_new_one_is_whole(tmp_path):
    spec = tiny_spec("llama")
    folder = write_random_model(tmp_path / "m", spec, seed=1)

    def dies_half_way():
        for index, pair in enumerate(random_tensors(spec, seed=2)):
            if index == 7:
                raise KeyboardInterrupt
            yield pair

    with pytest.raises(KeyboardInterrupt):
        save_folder(folder, spec, dies_half_way())
    with pytest.raises(CheckpointError, match="missing"):
        save_folder(folder, spec, list(random_tensors(spec, seed=2))[:-1])
    for name, tensor in open_model(folder).tensors():
        assert_same_bits(tensor, dict(random_tensors(spec, seed=1))[name], name)
    save_folder(folder, spec, random_tensors(spec, seed=2))
    second = dict(random_tensors(spec, seed=2))
    for name, tensor in open_model(folder).tensors():
        assert_same_bits(tensor, second[name], name)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_save_never_replaces_anything_but_a_model_folder(tmp_path):
    spec = tiny_spec("llama")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "diary.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("notes", "file"):
        with pytest.raises(ConfigError, match="not a model folder"):
            save_folder(tmp_path / name, spec, random_tensors(spec))
    assert (tmp_path / "notes" / "diary.txt").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    save_folder(tmp_path / "empty", spec, random_tensors(spec))


def test_save_carries_over_tokenizer_template_generation_and_other_config(tmp_path):
    spec = tiny_spec("llama", eos_token_ids=(2, 5))
    source = write_random_model(tmp_path / "source", spec)
    (source / "tokenizer.json").write_bytes(b"{}")
    (source / "chat_template.jinja").write_text("{{ messages }} \N{GRINNING FACE}")
    edit_json(source / "generation_config.json", top_k=3, eos_token_id=[2, 11])
    edit_json(source / "config.json", note="kept", auto_map={"AutoConfig": "configuration_own.OwnConfig"})
    files = open_model(source)
    folder = save_folder(tmp_path / "copy", files.spec, files.tensors(), files, {"fingerprint": "abc"})
    copy = open_model(folder)
    assert copy.spec == files.spec and copy.spec.eos_token_ids == (2, 5, 11)
    assert copy.chat_template == files.chat_template and copy.tokenizer_files() == files.tokenizer_files()
    assert copy.config["note"] == "kept" and "auto_map" not in copy.config and copy.generation_config == {
        "top_k": 3, "eos_token_id": [2, 5, 11], "bos_token_id": 1}  # fmt: skip
    assert json.loads((folder / "zerogap.json").read_text()) == {"fingerprint": "abc"}


def test_random_tensors_depend_on_seed_and_name():
    first, again, other = (dict(random_tensors(tiny_spec("qwen3"), seed=seed)) for seed in (1, 1, 2))
    for name, tensor in first.items():
        assert_same_bits(again[name], tensor, name)
        assert not torch.equal(other[name], tensor), name
    assert not torch.equal(first["model.layers.0.mlp.up_proj.weight"], first["model.layers.1.mlp.up_proj.weight"])


def test_random_models_have_peaked_logits(tmp_path):
    spec = tiny_spec("qwen3", hidden_size=128)
    folder = write_random_model(tmp_path / "m", spec, peak=6.0, storage=DType.FP32)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        logits = model(torch.arange(200)[None]).logits
    assert 4.0 < logits.std() < 9.0


def test_a_folder_that_cannot_be_made_is_refused_by_name(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="cannot be made"):
        save_folder(tmp_path / "file" / "model", tiny_spec("llama"), ())
