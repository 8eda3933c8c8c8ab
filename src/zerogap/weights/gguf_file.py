"""Read a GGUF file of a llama, qwen2 or qwen3 model: config from its metadata, tensors under Hugging Face names.

F32, F16 and BF16 tensors keep their dtype; Q8_0 and Q4_1 blocks are de-quantised in FP32 (`d * q`, `d * q + m`) and
rounded once to BF16. GGUF stores the query and key rows of llama models in the order of its own RoPE layout (pairs
next to each other); they are put back into the order of Hugging Face (halves), biases included. Sources: the GGUF
specification and llama.cpp's `convert_hf_to_gguf.py`.
"""

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from zerogap.errors import CheckpointError, ConfigError
from zerogap.models.spec import ModelSpec
from zerogap.weights.gguf_tokenizer import tokenizer_files
from zerogap.weights.model_files import ModelFiles, check_tensors

_KINDS = gguf.GGMLQuantizationType
FAMILIES = ("llama", "qwen2", "qwen3")
_READ_KINDS = (_KINDS.F32, _KINDS.F16, _KINDS.BF16, _KINDS.Q8_0, _KINDS.Q4_1)
_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufFiles(ModelFiles):
    """A .gguf file.

    Raises:
        CheckpointError: the file is truncated or corrupt, or its tensors do not fit its metadata.
        ConfigError: an architecture, quantisation or feature that is not supported.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._reader = gguf.GGUFReader(path)
        except (ValueError, KeyError, IndexError, TypeError, OverflowError, OSError) as error:
            size = path.stat().st_size if path.exists() else 0
            raise CheckpointError(f"{path}: not a whole GGUF file, {size} bytes ({error})") from error
        self._by_name = {_hugging_face_name(path, tensor.name): tensor for tensor in self._reader.tensors}
        meta = _Metadata(path, self._reader)
        config = _config(meta, {name: _shape(tensor) for name, tensor in self._by_name.items()})
        super().__init__(path, config, None, meta.optional("tokenizer.chat_template"))
        self._meta = meta
        for tensor in self._reader.tensors:
            if tensor.tensor_type not in _READ_KINDS:
                kinds = ", ".join(kind.name for kind in _READ_KINDS)
                raise ConfigError(f"{path}: {tensor.name}", tensor.tensor_type.name, f"use a file of {kinds}")
        check_tensors(str(path), self.spec, {name: _shape(tensor) for name, tensor in self._by_name.items()})

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in sorted(self._by_name.items()):
            value = _to_torch(tensor)
            if self.spec.family == "llama" and ".q_proj." in name:
                value = _unpermute(value, self.spec.num_heads)
            if self.spec.family == "llama" and ".k_proj." in name:
                value = _unpermute(value, self.spec.num_kv_heads)
            yield name, value

    @functools.cached_property
    def _tokenizer(self) -> dict[str, bytes]:
        return tokenizer_files(self._meta, self.spec.vocab_size)

    def tokenizer_files(self) -> dict[str, bytes]:
        return dict(self._tokenizer)


class _Metadata:
    """Typed access to the key-value part of the file; implements `gguf_tokenizer.Metadata`."""

    def __init__(self, path: Path, reader: gguf.GGUFReader) -> None:
        self.path, self._fields = path, reader.fields

    def optional(self, key: str) -> Any:
        field = self._fields.get(key)
        return None if field is None else field.contents()

    def required(self, key: str) -> Any:
        value = self.optional(key)
        if value is None:
            raise CheckpointError(f"{self.path}: metadata key {key} is missing")
        return value


def _config(meta: _Metadata, shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """The config.json mapping that the file's metadata and tensor list amount to."""
    family = meta.required("general.architecture")
    if family not in FAMILIES:
        raise ConfigError(f"{meta.path}: general.architecture", family, f"supported are {', '.join(FAMILIES)}")
    scaling = meta.optional(f"{family}.rope.scaling.type")
    if scaling not in (None, "none"):
        raise ConfigError(f"{meta.path}: {family}.rope.scaling.type", scaling, "use the safetensors folder instead")
    heads, hidden = meta.required(f"{family}.attention.head_count"), meta.required(f"{family}.embedding_length")
    head_dim = meta.optional(f"{family}.attention.key_length") or hidden // heads
    rotated = meta.optional(f"{family}.rope.dimension_count")
    if rotated not in (None, head_dim):
        raise ConfigError(f"{meta.path}: {family}.rope.dimension_count", rotated, f"only head_dim ({head_dim}) works")
    if "model.embed_tokens.weight" not in shapes:
        raise CheckpointError(f"{meta.path}: token_embd.weight is missing")
    spec = ModelSpec.from_hf(
        {
            "model_type": family,
            "hidden_act": "silu",  # what these three architectures are, by definition of the format
            "hidden_size": hidden,
            "intermediate_size": meta.required(f"{family}.feed_forward_length"),
            "num_hidden_layers": meta.required(f"{family}.block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": meta.required(f"{family}.attention.head_count_kv"),
            "head_dim": head_dim,
            "vocab_size": shapes["model.embed_tokens.weight"][0],
            "rms_norm_eps": _shortest(meta.required(f"{family}.attention.layer_norm_rms_epsilon")),
            "rope_theta": _shortest(meta.required(f"{family}.rope.freq_base")),
            "tie_word_embeddings": "lm_head.weight" not in shapes,
            "max_position_embeddings": meta.required(f"{family}.context_length"),
            **({"attention_bias": True} if "model.layers.0.self_attn.q_proj.bias" in shapes else {}),
            "eos_token_id": _eos_ids(meta),
            "bos_token_id": meta.optional("tokenizer.ggml.bos_token_id"),
            "pad_token_id": meta.optional("tokenizer.ggml.padding_token_id"),
        }
    )
    return json.loads(json.dumps(spec.to_hf()))


def _eos_ids(meta: _Metadata) -> list[int]:
    """End of sequence, and end of turn where the file names one."""
    ids = [meta.optional(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot")]
    return [token for token in ids if token is not None]


def _shortest(value: float) -> float:
    """The decimal number that was meant: GGUF stores FP32, config.json the decimal (9.999999747e-06 was 1e-05)."""
    return float(str(np.float32(value)))


def _hugging_face_name(path: Path, name: str) -> str:
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    match name.split("."):
        case ["blk", layer, stem, ("weight" | "bias") as ending] if layer.isdigit() and stem in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[stem]}.{ending}"
    if name == "rope_freqs.weight":
        mend = "the file folds Llama-3 RoPE scaling into factors; use the safetensors folder instead"
        raise ConfigError(f"{path}: rope_freqs.weight", "present", mend)
    return name  # reported as unexpected by check_tensors


def _shape(tensor: gguf.ReaderTensor) -> tuple[int, ...]:
    return tuple(int(size) for size in reversed(tensor.shape))


def _to_torch(tensor: gguf.ReaderTensor) -> torch.Tensor:
    shape, kind = _shape(tensor), tensor.tensor_type
    if kind == _KINDS.BF16:
        return (
            torch.from_numpy(np.ascontiguousarray(tensor.data).view(np.int16).copy()).view(torch.bfloat16).view(shape)
        )
    if kind in (_KINDS.F32, _KINDS.F16):
        return torch.from_numpy(np.array(tensor.data)).view(shape)
    return torch.from_numpy(gguf.dequantize(tensor.data, kind)).to(torch.bfloat16).view(shape)


def _unpermute(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """[heads * (half, 2), ...] in GGUF's order -> [heads * (2, half), ...] in Hugging Face's."""
    half = rows.shape[0] // heads // 2
    return rows.view(heads, half, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape).contiguous()
