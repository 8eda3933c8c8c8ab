"""Recorded experts: the same whatever the schedule, complete but for prefix hits, and free of an older version's."""

import numpy as np
import pytest

from tests.bits import assert_same_bits
from tests.tiny import tiny_decoder
from zerogap.errors import ConfigError
from zerogap.ops import tap
from zerogap.rollout.engine import Engine
from zerogap.types import SamplingKey, SamplingParams

PARAMS = SamplingParams(temperature=0.8, max_tokens=24, stop_token_ids=())
PROMPTS = [list(range(5, 60)), list(range(5, 45)), [7, 8, 9], [11] * 20]


@pytest.fixture(scope="module")
def decoder():
    return tiny_decoder("qwen3_moe")


def engine(decoder, **settings):
    defaults = {"record_routing": True, "kv_cache_bytes": 4 << 20, "max_sequences": 8, "max_batch_tokens": 64}
    return Engine(decoder, **(defaults | settings))


@pytest.fixture(scope="module")
def whole(decoder):
    """Samples with complete traces: nothing is shared and nothing preempted."""
    return engine(decoder, prefix_cache=False, max_batch_tokens=512).generate(PROMPTS, PARAMS)


def assert_same_traces(ours, theirs, complete=True):
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert a.completion_ids.tolist() == b.completion_ids.tolist()
        assert a.routing.experts.shape == b.routing.experts.shape
        both = a.routing.recorded & b.routing.recorded
        assert both.all() or not complete
        assert_same_bits(a.routing.experts[both], b.routing.experts[both], f"experts of sample {i}")
        assert_same_bits(a.routing.margins[both], b.routing.margins[both], f"margins of sample {i}")


def test_a_trace_has_every_token_but_the_last(whole, decoder):
    moe = decoder.spec.moe
    for prompt, sample in zip(PROMPTS, whole, strict=True):
        assert sample.routing.experts.shape == (len(prompt) + 23, decoder.spec.num_layers, moe.top_k)
        assert sample.routing.recorded.all() and (sample.routing.margins > 0).all()
        experts = sample.routing.experts
        assert (np.diff(experts) > 0).all() and experts.max() < moe.num_experts, "ascending, all different"
    everything = np.concatenate([s.routing.experts.reshape(-1) for s in whole])
    assert len(np.unique(everything)) == moe.num_experts, "the test sees every expert"


@pytest.mark.parametrize(
    "settings", [{"max_batch_tokens": 8}, {"max_sequences": 2, "page_size": 32}, {"page_size": 64}]
)
def test_schedules_do_not_change_a_trace(decoder, whole, settings):
    assert_same_traces(engine(decoder, prefix_cache=False, **settings).generate(PROMPTS, PARAMS), whole)


def test_an_open_tap_does_not_change_a_trace(decoder, whole):
    with tap.listen(lambda name, outputs, info: None):
        assert_same_traces(engine(decoder, prefix_cache=False).generate(PROMPTS, PARAMS), whole)


def test_preempted_sequences_are_recorded_again(decoder, whole):
    small = engine(decoder, prefix_cache=False, kv_cache_bytes=decoder.codec().bytes_per_token() * 2 * 16 * 8)
    assert_same_traces(small.generate(PROMPTS, PARAMS), whole)
    assert small.statistics.preemptions > 0


def test_prefix_hits_leave_gaps(decoder, whole):
    shared = engine(decoder)
    first = shared.generate(PROMPTS[:1], PARAMS)
    assert first[0].routing.recorded.all()
    again = shared.generate(PROMPTS, PARAMS, keys=[SamplingKey(prompt=i) for i in range(4)])
    hits = [int((~s.routing.recorded).sum()) for s in again]
    assert hits[0] == 48 and hits[1] == 32 and hits[2:] == [0, 0]  # whole pages of 16, without the last known token
    assert not again[0].routing.recorded[:48].any() and (again[0].routing.margins[:48] == 0).all()
    assert_same_traces(again, whole, complete=False)


def test_an_update_drops_the_trace_of_running_sequences(decoder):
    """Weights change after some tokens: every row of the trace is then of the new weights, or a gap."""
    own = tiny_decoder("qwen3_moe")
    running = engine(own)
    events = running.stream(PROMPTS[:1], PARAMS)
    for _ in range(5):
        next(events)
    (sequence,) = running._scheduler.running
    before = sequence.routing.first(sequence.computed)
    assert before.recorded.all()
    for name, handle in own.weights.items():
        handle.load(tiny_decoder("qwen3_moe", seed=2).weights[name].stored())
    own.version += 1
    running.update_weights(own)
    assert not sequence.routing.recorded.any()
    list(events)
    cold = engine(own, prefix_cache=False)
    ids = sequence.ids[: sequence.length]
    (alone,) = cold.generate([ids[:-1].tolist()], SamplingParams(max_tokens=1, stop_token_ids=()))
    assert_same_bits(sequence.routing.experts[: len(ids) - 1], alone.routing.experts, "experts at the new weights")
    assert before.different(alone.routing.first(len(before.experts))).any(), "the weights made a difference"


def test_nothing_is_recorded_unless_asked(decoder, whole):
    plain = engine(decoder, record_routing=False, prefix_cache=False).generate(PROMPTS, PARAMS)
    assert all(s.routing is None for s in plain)
    assert [s.completion_ids.tolist() for s in plain] == [s.completion_ids.tolist() for s in whole]
    for a, b in zip(plain, whole, strict=True):
        assert_same_bits(a.logprobs, b.logprobs, "log-probs")


def test_dense_models_are_refused():
    with pytest.raises(ConfigError, match="record_routing = True: this model has no experts"):
        Engine(tiny_decoder("llama"), record_routing=True)
