"""The tokenizer of a GGUF file as Hugging Face tokenizer files, so that text/ and transformers load the same one.

Byte-level BPE only. What a GGUF calls its pre-tokenizer is a name (`tokenizer.ggml.pre`) for a split rule that the
original tokenizer.json spells out; the table below gives, for the models supported here, the rule of that original.
An unknown name is refused: another split would give other ids.
"""

import json
from pathlib import Path
from typing import Any, Protocol

from zerogap.errors import CheckpointError, ConfigError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


_SPLITS: dict[str, dict[str, Any] | None] = {
    "gpt-2": None,
    "smollm": {"type": "Digits", "individual_digits": True},
    "qwen2": _split(_QWEN2),
    "llama-bpe": _split(_LLAMA3),
}
_GPT2_SPLIT = ("gpt-2", "smollm")  # these cut by the byte-level pre-tokenizer's own rule


class Metadata(Protocol):
    """Key-value access to a GGUF file."""

    path: Path

    def optional(self, key: str) -> Any: ...

    def required(self, key: str) -> Any: ...


def tokenizer_files(meta: Metadata, vocab_size: int) -> dict[str, bytes]:
    """`tokenizer.json` and `tokenizer_config.json` (with chat template), or nothing if the file has no tokenizer.

    Raises:
        ConfigError: not a byte-level BPE tokenizer, or an unknown pre-tokenizer.
        CheckpointError: its metadata contradicts itself or the embedding.
    """
    kind = meta.optional("tokenizer.ggml.model")
    if kind is None:
        return {}
    if kind != "gpt2":
        raise ConfigError(
            f"{meta.path}: tokenizer.ggml.model", kind, "only byte-level BPE (gpt2) is read; use a folder"
        )
    tokens, merges = meta.required("tokenizer.ggml.tokens"), meta.required("tokenizer.ggml.merges")
    types = meta.required("tokenizer.ggml.token_type")
    if len(set(tokens)) != len(tokens) or len(types) != len(tokens) or len(tokens) > vocab_size:
        raise CheckpointError(
            f"{meta.path}: {len(tokens)} tokens ({len(set(tokens))} distinct), {len(types)} token types and an "
            f"embedding of {vocab_size} rows do not fit together"
        )
    content = _tokenizer_json(meta, tokens, types, merges)
    return {
        "tokenizer.json": json.dumps(content, ensure_ascii=False).encode(),
        "tokenizer_config.json": json.dumps(_tokenizer_config(meta, tokens), indent=2, ensure_ascii=False).encode(),
    }


def _tokenizer_json(meta: Metadata, tokens: list[str], types: list[int], merges: list[str]) -> dict[str, Any]:
    pre = meta.required("tokenizer.ggml.pre")
    if pre not in _SPLITS:
        raise ConfigError(f"{meta.path}: tokenizer.ggml.pre", pre, f"known are {', '.join(_SPLITS)}")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": pre in _GPT2_SPLIT}
    split = _SPLITS[pre]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": index,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind == _CONTROL,
            }
            for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind in (_CONTROL, _USER_DEFINED)
        ],
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]} if split else byte_level,
        "post_processor": _bos_in_front(meta, tokens, pre),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre == "llama-bpe",
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in merges],
        },
    }


def _bos_in_front(meta: Metadata, tokens: list[str], pre: str) -> dict[str, Any] | None:
    """The post-processor that puts the beginning-of-sequence token in front, where the file asks for it."""
    wanted = meta.optional("tokenizer.ggml.add_bos_token")
    if not (pre == "llama-bpe" if wanted is None else wanted):  # the format's default for this pre-tokenizer
        return None
    index = _checked_id(meta, "bos", meta.required("tokenizer.ggml.bos_token_id"), tokens)
    bos = tokens[index]
    first = {"SpecialToken": {"id": bos, "type_id": 0}}
    text, pair = ({"Sequence": {"id": part, "type_id": order}} for order, part in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, pair],
        "special_tokens": {bos: {"id": bos, "ids": [index], "tokens": [bos]}},
    }


def _checked_id(meta: Metadata, key: str, index: int, tokens: list[str]) -> int:
    if not 0 <= index < len(tokens):
        raise CheckpointError(f"{meta.path}: tokenizer.ggml.{key}_token_id {index} is outside the vocabulary")
    return index


def _tokenizer_config(meta: Metadata, tokens: list[str]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = meta.optional(f"tokenizer.ggml.{key}_token_id")
        if token is not None:
            config[f"{name}_token"] = tokens[_checked_id(meta, key, token, tokens)]
    if (template := meta.optional("tokenizer.chat_template")) is not None:
        config["chat_template"] = template
    return config
