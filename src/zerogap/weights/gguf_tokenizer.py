"""The tokenizer of a GGUF file as Hugging Face tokenizer files, so that text/ and transformers load the same one.

Byte-level BPE only. What a GGUF calls its pre-tokenizer is a name (`tokenizer.ggml.pre`) for a split rule that the
original tokenizer.json spells out; the table below gives, for the models supported here, the rule of that original.
An unknown name is refused: another split would give other ids.
"""

import json
from pathlib import Path
from typing import Any, Protocol

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from zerogap.errors import CheckpointError, ConfigError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_CONTROL, _USER_DEFINED = 3, 4


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
    tokenizer = _byte_level_bpe(meta, tokens, merges)
    for token, token_type in zip(tokens, types, strict=True):
        if token_type == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif token_type == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(_tokenizer_config(meta, tokens), indent=2, ensure_ascii=False).encode(),
    }


def _byte_level_bpe(meta: Metadata, tokens: list[str], merges: list[str]) -> Tokenizer:
    pre = meta.required("tokenizer.ggml.pre")
    vocab = {token: index for index, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre == "llama-bpe"))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre in ("gpt-2", "smollm"))
    if pre == "gpt-2":
        tokenizer.pre_tokenizer = byte_level
    elif pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    elif pre in ("qwen2", "llama-bpe"):
        split = pre_tokenizers.Split(Regex(_QWEN2 if pre == "qwen2" else _LLAMA3), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
        if pre == "qwen2":
            tokenizer.normalizer = normalizers.NFC()
    else:
        raise ConfigError(f"{meta.path}: tokenizer.ggml.pre", pre, "known are gpt-2, smollm, qwen2 and llama-bpe")
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _tokenizer_config(meta: Metadata, tokens: list[str]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = meta.optional(f"tokenizer.ggml.{key}_token_id")
        if token is not None:
            if not 0 <= token < len(tokens):
                raise CheckpointError(f"{meta.path}: tokenizer.ggml.{key}_token_id {token} is outside the vocabulary")
            config[f"{name}_token"] = tokens[token]
    for key in ("add_bos_token", "add_eos_token"):
        if meta.optional(f"tokenizer.ggml.{key}") is not None:
            config[key] = bool(meta.optional(f"tokenizer.ggml.{key}"))
    if (template := meta.optional("tokenizer.chat_template")) is not None:
        config["chat_template"] = template
    return config
