"""Tiny random models for tests of the engine: every family, logits peaked enough that a wrong bit changes tokens."""

import functools

import torch

from tests.bits import assert_same_bits
from zerogap.models.decoder import Decoder
from zerogap.models.rope_spec import RopeSpec
from zerogap.models.spec import ModelSpec
from zerogap.numerics import preset
from zerogap.rollout.engine import Engine
from zerogap.types import Sample

VOCAB, POSITIONS = 320, 512
MODELS = [("llama", "bf16"), ("qwen2", "fp32"), ("qwen3", "bf16")]


def tiny_spec(family: str = "llama", **changes: object) -> ModelSpec:
    llama3 = RopeSpec(10000.0, "llama3", 4.0, 1.0, 4.0, 64)
    fields = {
        "family": family,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
        "vocab_size": VOCAB,
        "norm_eps": 1e-5,
        "rope": llama3 if family == "llama" else RopeSpec(10000.0),
        "tied": family == "llama",
        "qkv_bias": family == "qwen2",
        "o_bias": False,
        "qk_norm": family == "qwen3",
        "max_position": POSITIONS,
        "eos_token_ids": (2, 7, 9),
    }
    return ModelSpec(**(fields | changes))  # type: ignore[arg-type]


def build(family: str = "llama", numerics: str = "bf16", seed: int = 0, **changes: object) -> Decoder:
    """A decoder of its own, so that a test may change weights and version."""
    decoder = Decoder(tiny_spec(family, **changes), preset(numerics, kv_split=128))
    return decoder.load(random_tensors(decoder, seed))


@functools.cache
def shared(family: str = "llama", numerics: str = "bf16") -> Decoder:
    """The same decoder for every test that leaves it as it is."""
    return build(family, numerics)


def random_tensors(decoder: Decoder, seed: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for name, handle in decoder.weights.items():
        noise = torch.randn(handle.spec.shape, generator=generator)
        tensors.append((name, 1.0 + 0.2 * noise if name.endswith("norm.weight") else 0.2 * noise))
    return tensors


def engine(decoder: Decoder, **settings: object) -> Engine:
    """An engine with a small cache unless told otherwise."""
    return Engine(decoder, **({"kv_cache_bytes": 4 << 20, "max_sequences": 8, "max_batch_tokens": 128} | settings))  # type: ignore[arg-type]


def assert_same_samples(actual: list[Sample], expected: list[Sample]) -> None:
    """Same tokens, log-prob bits, kept sets and finish reasons, sample by sample."""
    assert len(actual) == len(expected)
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert a.completion_ids.tolist() == e.completion_ids.tolist(), f"sample {i}: other tokens"
        assert_same_bits(a.logprobs, e.logprobs, f"log-probs of sample {i}")
        assert (a.finish_reason, a.key, a.params) == (e.finish_reason, e.key, e.params)
        assert (a.kept_counts is None) == (e.kept_counts is None)
        if a.kept_counts is not None:
            assert_same_bits(a.kept_counts, e.kept_counts, f"kept counts of sample {i}")
            assert_same_bits(a.kept_digests, e.kept_digests, f"kept digests of sample {i}")
