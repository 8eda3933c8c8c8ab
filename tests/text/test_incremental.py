"""Incremental decoding: whole characters only, nothing lost, equal to decoding all ids at once."""

import random

import pytest
import tokenizers
import transformers

from tests.models_on_disk import quick_start_files
from tests.text.test_tokenizer import TEXTS
from zerogap.text import IncrementalDecoder, Tokenizer
from zerogap.text.incremental import REPLACEMENT


@pytest.fixture(scope="module")
def smol():
    return Tokenizer.from_files(quick_start_files().tokenizer_files())


@pytest.fixture(scope="module")
def sentencepiece_like():
    """Metaspace BPE with byte fallback (the kind of Llama 2): a leading space is dropped, unknown letters are bytes."""
    vocab = {"<s>": 0, "</s>": 1, **{f"<0x{b:02X}>": 2 + b for b in range(256)}}
    for piece in ["\u2581", "h", "i", "a", "hi", "\u2581hi", "\u2581a"]:
        vocab[piece] = len(vocab)
    merges = [("h", "i"), ("\u2581", "hi"), ("\u2581", "a")]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True))
    backend.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("\u2581"), tokenizers.normalizers.Replace(" ", "\u2581")]
    )
    parts = [("\u2581", " ")]
    backend.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.Replace(*parts[0]), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
        + [tokenizers.decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>"))


def pieces_of(tokenizer, ids, skip=True):
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip)
    return [decoder.push(token) for token in ids], decoder.flush()


@pytest.mark.parametrize("text", TEXTS)
def test_only_whole_characters_come_out(smol, text):
    pieces, rest = pieces_of(smol, smol.encode(text))
    assert "".join(pieces) + rest == text
    given = "".join(pieces)
    assert given.count(REPLACEMENT) <= text.count(REPLACEMENT)
    if not text.endswith(REPLACEMENT):
        assert rest == ""


def test_an_emoji_comes_with_its_last_byte(smol):
    ids = smol.encode("\U0001f9ec")
    assert len(ids) > 1
    pieces, rest = pieces_of(smol, ids)
    assert pieces == [""] * (len(ids) - 1) + ["\U0001f9ec"] and rest == ""


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("skip", [True, False])
def test_random_ids_join_to_the_whole_decoding(smol, seed, skip):
    """Random ids are full of broken UTF-8, lone continuation bytes and special tokens."""
    rng = random.Random(seed)
    bytes_only = [token for token in range(17, 17 + 256)]  # noqa: C416
    ids = [rng.choice(bytes_only) if rng.random() < 0.7 else rng.randrange(49152) for _ in range(120)]
    ids = [rng.randrange(17) if rng.random() < 0.05 else token for token in ids]
    pieces, rest = pieces_of(smol, ids, skip)
    assert "".join(pieces) + rest == smol.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("text", ["hi hi a", "a hi", "hi \u6f22\u5b57 hi\U0001f600 a", " hi", "\u201chi\u201d"])
def test_byte_fallback_and_leading_spaces(sentencepiece_like, text):
    ids = [0, *sentencepiece_like.backend(text, add_special_tokens=False)["input_ids"], 1]
    pieces, rest = pieces_of(sentencepiece_like, ids)
    assert "".join(pieces) + rest == sentencepiece_like.decode(ids, skip_special_tokens=True) == text
    assert all(REPLACEMENT not in piece for piece in pieces)


def test_an_unfinished_character_is_flushed_as_a_replacement(smol):
    ids = smol.encode("x\U0001f9ec")[:-1]
    pieces, rest = pieces_of(smol, ids)
    assert "".join(pieces) == "x" and set(rest) == {REPLACEMENT}


def test_cost_per_token_does_not_grow(smol):
    """The window that is decoded per token stays small over a long completion."""
    calls = []

    class Counting:
        special_ids = smol.special_ids

        def decode(self, ids, skip_special_tokens=False):
            calls.append(len(ids))
            return smol.decode(ids, skip_special_tokens=skip_special_tokens)

    decoder = IncrementalDecoder(Counting())
    for token in [*smol.encode("\U0001f600 word \u6f22\u5b57" * 100), *[2] * 50, *smol.encode("\U0001f600" * 100)]:
        decoder.push(token)
    assert max(calls) <= 12
