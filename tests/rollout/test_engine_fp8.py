"""The engine over an FP8 cache with calibrated scales: which set it reads, and when it has one."""

import pytest

from tests.rollout.tiny_models import assert_same_samples, build, engine
from zerogap.errors import ConfigError, ContractError
from zerogap.numerics import Numerics, preset
from zerogap.ops.kv_scales import KVScales
from zerogap.types import SamplingParams

PROMPT = [5, 80, 200, 13, 44]
LONG = SamplingParams(max_tokens=40, stop_token_ids=())


def calibrated() -> Numerics:
    return preset("fp8-kv", kv_scale="calibrated", kv_split=128)


def test_scales_come_from_the_first_prompts_and_stay():
    decoder = build(numerics=calibrated())
    with pytest.raises(ContractError, match="none are known"):
        engine(decoder).score(PROMPT, [3], LONG)
    running = engine(decoder)
    first = running.generate([PROMPT], LONG)
    name = decoder.kv_scales.name
    assert {s.scale_set for s in first} == {name}
    assert {s.scale_set for s in running.generate([[5, 6, 7]], LONG)} == {name}
    other = build(numerics=calibrated())
    other.calibrate([PROMPT])
    assert other.kv_scales.name == name
    assert_same_samples(engine(other).generate([PROMPT], LONG), first)


def test_other_weights_need_an_update_before_they_are_calibrated():
    decoder = build(numerics=calibrated())
    running = engine(decoder)
    running.generate([PROMPT], LONG)
    decoder.load((name, handle.value()) for name, handle in build(numerics=calibrated(), seed=9).weights.items())
    with pytest.raises(ConfigError, match="call update_weights after load"):
        running.generate([PROMPT], LONG)
    running.update_weights(decoder)
    fresh = engine(build(numerics=calibrated(), seed=9))
    assert_same_samples(running.generate([PROMPT], LONG), fresh.generate([PROMPT], LONG))


def test_an_engine_that_takes_another_decoder_reads_its_cache_with_that_decoders_scales():
    first, other = build(numerics=calibrated()), build(numerics=calibrated())
    running = engine(first)
    before = running.generate([PROMPT], LONG)
    other.set_kv_scales(KVScales(3.0 * first.kv_scales.values))
    running.update_weights(other)
    fresh = engine(other).generate([PROMPT], LONG)
    assert_same_samples(running.generate([PROMPT], LONG), fresh)
    assert before[0].logprobs.tolist() != fresh[0].logprobs.tolist()  # the scales matter
    assert_same_samples(engine(first).generate([PROMPT], LONG), before)
