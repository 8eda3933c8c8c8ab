"""Speculation changes no token and no bit of a log-prob: guesses of any quality, everything the engine may meet.

The reference is plain decoding. The engines compute every guess that they find, whether it is worth it or not.
"""

import dataclasses
import functools

import numpy as np
import pytest

from tests.rollout.tiny_models import MODELS, VOCAB, assert_same_samples, build, engine, shared
from tests.tiny import tiny_decoder
from zerogap.numerics import preset
from zerogap.ops import tap
from zerogap.rollout.engine import Engine
from zerogap.rollout.speculate import Speculation
from zerogap.types import Sample, SamplingKey, SamplingParams

ALL = Speculation(draft_tokens=8, min_match=1, always=True)
FREE = {"stop_token_ids": ()}
PARAMS = (
    SamplingParams(temperature=0.0, max_tokens=40, **FREE),
    SamplingParams(temperature=0.3, max_tokens=40, **FREE),
    SamplingParams(temperature=0.3, max_tokens=33),
    SamplingParams(temperature=0.4, top_k=3, max_tokens=40, **FREE),
    SamplingParams(temperature=0.5, top_p=0.8, min_p=0.05, max_tokens=40, **FREE),
    SamplingParams(temperature=1.0, max_tokens=40, **FREE),
)
LENGTHS = (1, 15, 17, 63, 64, 90)


def prompts():
    rng = np.random.default_rng(3)
    return [rng.integers(0, VOCAB, length).tolist() for length in LENGTHS]


def keys(step, count=len(LENGTHS)):
    return [SamplingKey(seed=9, step=step, prompt=i) for i in range(count)]


def epochs(chosen: Engine, count: int = 3) -> list[Sample]:
    """The same prompts with fresh noise again and again, twice each; the last epoch repeats the keys of the first."""
    steps = [*range(count), 0]
    return [s for step in steps for s in chosen.generate(prompts(), PARAMS, keys(step), num_samples=2)]


@functools.cache
def plain() -> list[Sample]:
    """Two epochs of plain decoding."""
    return epochs(engine(shared()), 2)


def guesses(chosen: Engine) -> tuple[int, int]:
    counts = chosen.statistics
    return counts.accepted_tokens, counts.draft_tokens - counts.accepted_tokens


each_model = pytest.mark.parametrize(("family", "numerics"), MODELS)


@each_model
@pytest.mark.parametrize("draft_tokens", [1, 4, 16])
def test_speculation_draws_what_plain_decoding_draws(family, numerics, draft_tokens):
    alone = engine(shared(family, numerics))
    guessing = engine(shared(family, numerics), speculation=dataclasses.replace(ALL, draft_tokens=draft_tokens))
    assert_same_samples(epochs(guessing), epochs(alone))
    accepted, rejected = guesses(guessing)
    assert accepted > 300 and rejected > 300
    assert guessing.statistics.steps < alone.statistics.steps
    assert guessing._scheduler.pool.held == 0


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"kv_scale": "calibrated"},
        {"attention_math": "fp8"},
        {"kv_scale": "calibrated", "attention_math": "fp8", "scale_format": "pow2"},
    ],
    ids=str,
)
def test_speculation_over_fp8_pages(fields):
    decoder = build(numerics=preset("fp8-kv", kv_split=128, **fields))
    expected = epochs(engine(decoder), 2)
    guessing = engine(decoder, speculation=ALL)
    assert_same_samples(epochs(guessing, 2), expected)
    accepted, rejected = guesses(guessing)
    assert accepted > 100 and rejected > 100


@pytest.mark.parametrize(
    "settings",
    [
        {"max_sequences": 1},
        {"max_batch_tokens": 8},
        {"max_batch_tokens": 9},
        {"page_size": 64},
        {"prefix_cache": False},
        {"max_sequences": 3, "max_batch_tokens": 17},
    ],
    ids=str,
)
def test_speculation_in_engines_of_any_size(settings):
    guessing = engine(shared(), speculation=ALL, **settings)
    assert_same_samples(epochs(guessing, 2), plain())
    assert min(guesses(guessing)) > 0 or settings == {"max_batch_tokens": 8}  # which has no room for guesses at times


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_speculation_where_sequences_are_preempted(prefix_cache):
    decoder = shared()
    page = decoder.codec().bytes_per_token() * 16 * decoder.spec.num_layers
    tight = engine(decoder, kv_cache_bytes=14 * page, prefix_cache=prefix_cache, speculation=ALL)
    assert_same_samples(epochs(tight, 2), plain())
    assert tight.statistics.preemptions > 0
    assert min(guesses(tight)) > 0
    tight._scheduler.pool.check()


def test_pages_of_the_prefix_cache_hold_no_rejected_guess():
    """Whatever was rejected on the way, what continues the samples reads keys and values of their tokens alone."""
    guessing, cold = engine(shared(), speculation=ALL, kv_cache_bytes=8 << 20), engine(shared(), prefix_cache=False)
    samples = epochs(guessing, 2)
    assert min(guesses(guessing)) > 0
    before = guessing.statistics.cache_hit_tokens
    hits = 0
    for sample in samples:
        ids = [*sample.prompt_ids.tolist(), *sample.completion_ids.tolist()]
        assert guessing.logits(ids, len(ids) - 1).tobytes() == cold.logits(ids, len(ids) - 1).tobytes()
        longer = guessing.generate([ids], SamplingParams(max_tokens=3, **FREE))
        assert_same_samples(longer, cold.generate([ids], SamplingParams(max_tokens=3, **FREE)))
        hits += len(sample.completion_ids) // 16 * 16
    assert guessing.statistics.cache_hit_tokens - before >= hits > 0


def test_speculation_op_by_op():
    guessing = engine(shared(), speculation=ALL)
    with tap.listen(lambda name, outputs, info: None):
        samples = epochs(guessing, 2)
    assert_same_samples(samples, plain())
    assert min(guesses(guessing)) > 0


def test_a_stream_gives_every_token_once_and_in_order():
    guessing = engine(shared(), speculation=ALL)
    guessing.generate(prompts(), PARAMS, keys(0))
    events = list(guessing.stream(prompts(), PARAMS, keys(1)))
    for i, sample in enumerate(engine(shared()).generate(prompts(), PARAMS, keys(1))):
        mine = [e for e in events if e.index == i]
        assert [e.token for e in mine] == sample.completion_ids.tolist()
        assert [e.logprob for e in mine] == sample.logprobs.tolist()
        assert [e.finish_reason for e in mine] == [None] * (len(mine) - 1) + [sample.finish_reason]
    assert min(guesses(guessing)) > 0


def test_new_weights_draw_their_own_tokens_from_old_guesses():
    decoder, again = build(), build()
    guessing = engine(decoder, speculation=ALL)
    epochs(guessing, 1)
    for changed in (decoder, again):
        changed.load([(name, 1.05 * handle.value()) for name, handle in changed.weights.items()])
    guessing.update_weights(decoder)
    assert_same_samples(epochs(guessing, 2), epochs(engine(again), 2))
    assert min(guesses(guessing)) > 0


def test_weights_that_change_while_guesses_wait():
    """In the middle of a completion: what was drawn stays, all else is drawn from the new weights."""

    def drawn(tokens: int, **settings: object) -> tuple[int, list[tuple[int, float]]]:
        decoder = build()
        chosen = engine(decoder, **settings)
        chosen.generate(prompts()[:1], PARAMS[0], keys(0, 1))
        stream = chosen.stream(prompts()[:1], PARAMS[0], keys(1, 1))
        events = [next(stream) for _ in range(tokens)]
        (sequence,) = chosen._scheduler.running
        before = sequence.num_drawn
        decoder.load([(name, 1.05 * handle.value()) for name, handle in decoder.weights.items()])
        chosen.update_weights(decoder)
        events += stream
        assert settings == {} or min(guesses(chosen)) > 0
        return before, [(e.token, e.logprob) for e in events]

    before, tokens = drawn(12, speculation=ALL)
    assert before > 12  # several tokens of one pass
    assert drawn(before) == (before, tokens)


def test_guesses_that_are_all_wrong_cost_no_token():
    """Samples of another model are remembered: nearly nothing of them is right."""
    other = engine(build(seed=1)).generate(prompts(), PARAMS[-1], keys(7), num_samples=4)
    guessing = engine(shared(), speculation=ALL)
    guessing.remember(other)
    assert_same_samples(
        guessing.generate(prompts(), PARAMS, keys(8)), engine(shared()).generate(prompts(), PARAMS, keys(8))
    )
    assert guessing.statistics.draft_tokens > 3 * guessing.statistics.accepted_tokens


def test_experts_of_the_same_tokens_are_recorded():
    decoder = tiny_decoder("qwen3_moe")
    settings = {"record_routing": True, "prefix_cache": False}
    alone, guessing = (engine(decoder, speculation=chosen, **settings) for chosen in (None, ALL))
    for mine, expected in zip(epochs(guessing, 2), epochs(alone, 2), strict=True):
        assert mine.completion_ids.tolist() == expected.completion_ids.tolist()
        assert mine.logprobs.tobytes() == expected.logprobs.tobytes()
        assert mine.routing.experts.tobytes() == expected.routing.experts.tobytes()
        assert mine.routing.margins.tobytes() == expected.routing.margins.tobytes()
    assert min(guesses(guessing)) > 0
