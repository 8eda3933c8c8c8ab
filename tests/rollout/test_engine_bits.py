"""Nothing that the engine decides can change a token or a bit of a log-prob.

The reference is the plainest way to run: one request at a time, in one chunk, no prefix cache, one thread. Every
variant is compared with it as bits, for each family, in BF16 and FP32.
"""

import functools

import numpy as np
import pytest

from tests.rollout.tiny_models import MODELS, VOCAB, assert_same_samples, build, engine, shared
from zerogap.ops import tap
from zerogap.ops.cpu import library
from zerogap.types import SamplingKey, SamplingParams

# Lengths around the attention block (64), the page (16) and the span (128); one of a single token.
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 130)
MIXED = (
    SamplingParams(temperature=1.0, max_tokens=20),
    SamplingParams(temperature=0.0, max_tokens=12),
    SamplingParams(temperature=0.6, top_k=5, max_tokens=20),
    SamplingParams(temperature=1.3, top_p=0.9, max_tokens=9, stop_token_ids=()),
    SamplingParams(temperature=1.0, min_p=0.1, top_p=0.8, max_tokens=20),
    SamplingParams(temperature=1.0, max_tokens=1),
    SamplingParams(temperature=0.5, max_tokens=20, stop_token_ids=()),
    SamplingParams(temperature=1.0, max_tokens=20, stop_token_ids=()),
)
KEYS = tuple(SamplingKey(seed=5, step=3, prompt=i, attempt=1, sample=2 * i) for i in range(len(LENGTHS)))


def prompts():
    rng = np.random.default_rng(1)
    return [rng.integers(0, VOCAB, length).tolist() for length in LENGTHS]


@functools.cache
def reference(family, numerics):
    plain = engine(shared(family, numerics), max_sequences=1, max_batch_tokens=256, prefix_cache=False)
    with library.use_threads(1):
        return [plain.generate([p], s, [k])[0] for p, s, k in zip(prompts(), MIXED, KEYS)]


each_model = pytest.mark.parametrize(("family", "numerics"), MODELS)


@each_model
def test_the_reference_draws_varied_tokens(family, numerics):
    samples = reference(family, numerics)
    tokens = np.concatenate([s.completion_ids for s in samples])
    assert len(tokens) > 60
    assert len(set(tokens.tolist())) > 25
    assert all(np.isfinite(s.logprobs).all() for s in samples)
    assert sum(float(s.logprobs.min()) < -1.0 for s in samples) >= 3


@each_model
@pytest.mark.parametrize("max_sequences", [3, 8])
def test_batches_of_many(family, numerics, max_sequences):
    many = engine(shared(family, numerics), max_sequences=max_sequences)
    assert_same_samples(many.generate(prompts(), MIXED, KEYS), reference(family, numerics))


@each_model
@pytest.mark.parametrize("max_batch_tokens", [8, 15, 16, 63, 64, 65, 127, 129])
def test_chunk_sizes(family, numerics, max_batch_tokens):
    chunked = engine(shared(family, numerics), max_batch_tokens=max_batch_tokens)
    assert_same_samples(chunked.generate(prompts(), MIXED, KEYS), reference(family, numerics))


@each_model
@pytest.mark.parametrize("page_size", [16, 48, 64, 128])
def test_page_sizes(family, numerics, page_size):
    paged = engine(shared(family, numerics), page_size=page_size)
    assert_same_samples(paged.generate(prompts(), MIXED, KEYS), reference(family, numerics))


@each_model
def test_order_of_requests(family, numerics):
    samples = engine(shared(family, numerics), max_sequences=3).generate(prompts()[::-1], MIXED[::-1], KEYS[::-1])
    assert_same_samples(samples[::-1], reference(family, numerics))


@each_model
@pytest.mark.parametrize("page_size", [16, 64])
def test_a_warm_prefix_cache(family, numerics, page_size):
    warm = engine(shared(family, numerics), page_size=page_size)
    assert_same_samples(warm.generate(prompts(), MIXED, KEYS), reference(family, numerics))
    before = warm.statistics
    assert_same_samples(warm.generate(prompts(), MIXED, KEYS), reference(family, numerics))
    after = warm.statistics
    expected = sum((length - 1) // page_size * page_size for length in LENGTHS)
    assert after.cache_hit_tokens - before.cache_hit_tokens == expected > 0
    assert after.prefill_tokens - before.prefill_tokens == sum(LENGTHS) - expected


@each_model
def test_group_members_that_share_their_prompt_in_one_step(family, numerics):
    prompt = prompts()[-1][:70]
    params = SamplingParams(max_tokens=10, stop_token_ids=())
    group = engine(shared(family, numerics))
    together = group.generate([prompt], params, num_samples=6)
    assert group.statistics.cache_hit_tokens == 5 * 64
    alone = engine(shared(family, numerics), prefix_cache=False, max_sequences=1)
    keys = [SamplingKey(sample=j) for j in range(6)]
    assert_same_samples(together, [alone.generate([prompt], params, [key])[0] for key in keys])
    assert alone.statistics.cache_hit_tokens == 0


@each_model
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_preemption(family, numerics, prefix_cache):
    decoder = shared(family, numerics)
    page = decoder.codec().bytes_per_token() * 16 * decoder.spec.num_layers
    tight = engine(decoder, kv_cache_bytes=12 * page, prefix_cache=prefix_cache)
    params = [SamplingParams(max_tokens=60, stop_token_ids=()) for _ in range(8)]
    short = [p[:40] for p in prompts()]
    samples = tight.generate(short, params, KEYS)
    assert tight.statistics.preemptions > 0
    roomy = engine(decoder, kv_cache_bytes=8 << 20)
    assert_same_samples(samples, roomy.generate(short, params, KEYS))
    assert roomy.statistics.preemptions == 0


@each_model
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads(family, numerics, threads):
    with library.use_threads(threads):
        samples = engine(shared(family, numerics)).generate(prompts(), MIXED, KEYS)
    assert_same_samples(samples, reference(family, numerics))


@each_model
def test_op_by_op_and_recorded_program(family, numerics):
    seen = set()
    with tap.listen(lambda name, outputs, info: seen.add(name)):
        samples = engine(shared(family, numerics)).generate(prompts(), MIXED, KEYS)
    assert {"attention", "sample"} <= seen
    assert_same_samples(samples, reference(family, numerics))


@each_model
def test_switching_between_op_by_op_and_program_within_a_completion(family, numerics):
    mixed = engine(shared(family, numerics))
    stream = mixed.stream(prompts(), MIXED, KEYS)
    events = [next(stream) for _ in range(20)]
    with tap.listen(lambda name, outputs, info: None):
        events += [next(stream) for _ in range(20)]
    events += stream
    for i, sample in enumerate(reference(family, numerics)):
        mine = [e for e in events if e.index == i]
        assert [e.token for e in mine] == sample.completion_ids.tolist()
        assert [e.logprob for e in mine] == sample.logprobs.tolist()
        assert [e.finish_reason for e in mine] == [None] * (len(mine) - 1) + [sample.finish_reason]


@each_model
def test_a_request_that_arrives_while_others_run(family, numerics):
    busy = engine(shared(family, numerics))
    stream = busy.stream(prompts()[:4], MIXED[:4], KEYS[:4])
    first = [next(stream) for _ in range(6)]
    late = busy.generate(prompts()[4:], MIXED[4:], KEYS[4:])
    events = [*first, *stream]
    assert_same_samples(late, reference(family, numerics)[4:])
    for i in range(4):
        expected = reference(family, numerics)[i]
        assert [e.token for e in events if e.index == i] == expected.completion_ids.tolist()
        assert [e.logprob for e in events if e.index == i] == expected.logprobs.tolist()


@each_model
@pytest.mark.parametrize("chunk_tokens", [5, 16, 63, 64, 65, 200])
def test_scoring_gives_the_log_probs_of_drawing(family, numerics, chunk_tokens):
    scorer = engine(shared(family, numerics))
    for sample in reference(family, numerics):
        scores = scorer.score(sample.prompt_ids, sample.completion_ids, sample.params, chunk_tokens=chunk_tokens)
        assert scores.tobytes() == sample.logprobs.tobytes()


@each_model
def test_logits_do_not_depend_on_chunks_pages_or_cached_prefix(family, numerics):
    ids = prompts()[-1]
    whole = engine(shared(family, numerics), page_size=64).logits(ids, chunk_tokens=200)
    assert whole.shape == (len(ids), VOCAB)
    warm = engine(shared(family, numerics))
    warm.generate([ids], SamplingParams(max_tokens=2))
    for first in (0, 1, 64, 100, len(ids) - 1):
        for chunk in (7, 64):
            with CountRows() as rows:
                assert warm.logits(ids, first, chunk_tokens=chunk).tobytes() == whole[first:].tobytes()
            assert rows.count == len(ids) - first // 16 * 16  # shared pages are read, not written again


class CountRows:
    """Rows that went into the model inside the block."""

    def __enter__(self):
        self.count, self._listening = 0, tap.listen(self._see)
        self._listening.__enter__()
        return self

    def __exit__(self, *error):
        self._listening.__exit__(*error)

    def _see(self, name, outputs, info):
        self.count += len(outputs["out"]) if name == "embedding" else 0


def test_other_weights_give_other_tokens():
    """The control: the comparison above can fail."""
    other = engine(build(seed=1)).generate(prompts(), MIXED, KEYS)
    with pytest.raises(AssertionError, match="other tokens"):
        assert_same_samples(other, reference("llama", "bf16"))
