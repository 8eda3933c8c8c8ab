"""What a caller sees of the engine: how completions end, keys, weight updates, limits, streams, statistics."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from tests.bits import assert_same_bits
from tests.rollout.tiny_models import POSITIONS, VOCAB, assert_same_samples, build, engine, shared, tiny_spec
from zerogap.errors import CapacityError, ConfigError, ContractError, NonFiniteError
from zerogap.models.decoder import Decoder
from zerogap.numerics import preset
from zerogap.ops import sampling, tap
from zerogap.rollout.engine import Engine
from zerogap.types import SamplingKey, SamplingParams
from zerogap.weights import open_model
from zerogap.weights.random_model import write_random_model

PROMPT = [5, 80, 200, 13, 44]
LONG = SamplingParams(max_tokens=40, stop_token_ids=())


class Letters:
    """A tokenizer whose ids are letters: id i is chr(65 + i % 26), ids from 300 on are half of a two-byte character."""

    bos_token_id = None
    special_ids = frozenset()

    def prompt_ids(self, prompt):
        if isinstance(prompt, str):
            return np.array([ord(c) - 65 for c in prompt], np.int32)
        return np.asarray(prompt if not isinstance(prompt[0], dict) else [ord(c) - 65 for c in prompt[0]["content"]])

    def decode(self, ids, skip_special_tokens=False):
        return "".join(chr(65 + int(i) % 26) for i in ids)


# ---- ends of completions


def test_without_stop_ids_a_completion_has_max_tokens_and_nothing_is_appended():
    (sample,) = engine(shared()).generate([PROMPT], dataclasses.replace(LONG, max_tokens=13))
    assert sample.finish_reason == "length"
    assert len(sample.completion_ids) == len(sample.logprobs) == len(sample.versions) == 13
    assert sample.prompt_ids.tolist() == PROMPT


@pytest.mark.parametrize("place", [0, 3, 11])
def test_a_stop_id_ends_a_completion_and_keeps_its_own_log_prob(place):
    (free,) = engine(shared()).generate([PROMPT], LONG)
    stop = int(free.completion_ids[place])
    first = free.completion_ids.tolist().index(stop)
    params = dataclasses.replace(LONG, stop_token_ids=(VOCAB + 5, stop))
    (sample,) = engine(shared()).generate([PROMPT], params)
    assert sample.finish_reason == "stop"
    assert sample.completion_ids.tolist() == free.completion_ids[: first + 1].tolist()
    assert sample.logprobs.tobytes() == free.logprobs[: first + 1].tobytes()


@pytest.mark.parametrize("pad", [None, 2, 9])
def test_each_of_several_end_ids_ends_a_completion_and_keeps_its_own_log_prob(pad):
    """Also where the padding id is one of them: nothing is ever padded, so it has no other meaning."""
    ending = engine(build(pad_token_id=pad))
    params, prompt = SamplingParams(max_tokens=200, temperature=1.5), [*PROMPT, 2, 9]
    free = ending.generate([prompt], dataclasses.replace(params, stop_token_ids=()), num_samples=24)
    ends = []
    for whole, sample in zip(free, ending.generate([prompt], params, num_samples=24), strict=True):
        places = [i for i, token in enumerate(whole.completion_ids.tolist()) if token in (2, 7, 9)]
        length = places[0] + 1 if places else 200
        assert sample.finish_reason == ("stop" if places else "length")
        assert sample.completion_ids.tolist() == whole.completion_ids[:length].tolist()
        assert sample.logprobs.tobytes() == whole.logprobs[:length].tobytes()
        if places:
            row = ending.logits([*prompt, *sample.completion_ids], len(prompt) + length - 2)[0].astype(np.float64) / 1.5
            ends.append((int(sample.completion_ids[-1]), float(sample.logprobs[-1])))
            # FP32 rounding of z / T, distance and log at magnitudes below 16, and a sum of 320 terms.
            assert abs(ends[-1][1] - (row[ends[-1][0]] - row.max() - np.log(np.exp(row - row.max()).sum()))) < 2.0**-16
    assert {token for token, _ in ends} == {2, 7, 9}
    assert min(logprob for _, logprob in ends) < np.log(0.01) < max(logprob for _, logprob in ends)


def test_a_stop_id_that_is_the_last_allowed_token_counts_as_stop():
    (free,) = engine(shared()).generate([PROMPT], LONG)
    first = free.completion_ids.tolist().index(int(free.completion_ids[4]))
    params = SamplingParams(max_tokens=first + 1, stop_token_ids=(int(free.completion_ids[4]),))
    assert engine(shared()).generate([PROMPT], params)[0].finish_reason == "stop"


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 8])
def test_stop_ids_before_min_tokens_are_ignored_and_the_tokens_stay_the_same(min_tokens):
    (free,) = engine(shared()).generate([PROMPT], LONG)
    params = dataclasses.replace(LONG, stop_token_ids=tuple(range(VOCAB)), min_tokens=min_tokens)
    (sample,) = engine(shared()).generate([PROMPT], params)
    assert sample.finish_reason == "stop"
    assert len(sample.completion_ids) == max(min_tokens, 1)
    assert sample.completion_ids.tolist() == free.completion_ids[: len(sample.completion_ids)].tolist()
    assert sample.logprobs.tobytes() == free.logprobs[: len(sample.completion_ids)].tobytes()


def test_a_stop_string_across_token_borders_ends_a_completion():
    (free,) = engine(shared(), tokenizer=Letters()).generate([PROMPT], LONG)
    stop = free.text[9:12]
    at = free.text.index(stop)
    (sample,) = engine(shared(), tokenizer=Letters()).generate([PROMPT], dataclasses.replace(LONG, stop=(stop,)))
    assert sample.finish_reason == "stop"
    assert sample.completion_ids.tolist() == free.completion_ids[: at + 3].tolist()
    assert sample.text == free.text[:at]


def test_text_and_messages_are_prompts_too():
    speaking = engine(shared(), tokenizer=Letters())
    as_text, as_chat, as_ids = (
        speaking.generate([p], LONG)[0] for p in ("HELLO", [{"role": "user", "content": "HELLO"}], [7, 4, 11, 11, 14])
    )
    assert_same_samples([as_text, as_chat], [as_ids, as_ids])
    assert as_text.text == Letters().decode(as_text.completion_ids)


class OneText(Letters):
    """A tokenizer of which every id is a part of a character, and so the same text."""

    def decode(self, ids, skip_special_tokens=False):
        return "\N{REPLACEMENT CHARACTER}" * len(ids)


def test_ids_of_equal_text_are_told_apart():
    params = dataclasses.replace(LONG, temperature=1.5)
    (silent,) = engine(shared()).generate([PROMPT], params)
    speaking = engine(shared(), tokenizer=OneText())
    (sample,) = speaking.generate([PROMPT], params)
    assert_same_samples([sample], [silent])
    assert set(sample.text) == {"\N{REPLACEMENT CHARACTER}"}
    events = list(speaking.stream([PROMPT], params))
    assert [(e.token, e.logprob) for e in events] == list(zip(silent.completion_ids, silent.logprobs, strict=True))
    assert len({e.token for e in events}) > 10


# ---- sampling


def test_zero_temperature_is_greedy_and_records_the_untempered_log_prob():
    ids = [*PROMPT]
    greedy = engine(shared())
    (sample,) = greedy.generate([ids], dataclasses.replace(LONG, temperature=0.0))
    logits = greedy.logits([*ids, *sample.completion_ids], len(ids) - 1)[:-1].astype(np.float64)
    assert sample.completion_ids.tolist() == logits.argmax(1).tolist()
    largest = logits.max(1)
    expected = -np.log(np.exp(logits - largest[:, None]).sum(1))
    # FP32 exp, sum and log over 320 terms: relative error of the sum below 2^-17, absolute error of the log alike.
    assert np.abs(sample.logprobs - expected).max() < 2.0**-16


def test_a_key_decides_the_draw_and_nothing_else_does():
    keys = [
        SamplingKey(seed=1, step=s, prompt=p, attempt=a, sample=n)
        for s in (0, 1)
        for p in (0, 1)
        for a in (0, 1)
        for n in (0, 1)
    ]
    once = engine(shared()).generate([PROMPT] * len(keys), LONG, keys)
    again = engine(shared()).generate([PROMPT] * len(keys), LONG, keys[::-1])[::-1]
    assert_same_samples(once, again)
    assert len({tuple(s.completion_ids.tolist()) for s in once}) == len(keys)
    other_seed = engine(shared()).generate([PROMPT], LONG, [dataclasses.replace(keys[0], seed=2)])
    assert other_seed[0].completion_ids.tolist() != once[0].completion_ids.tolist()


def test_each_draw_is_the_sampling_op_on_the_rows_logits_and_the_key_at_its_place_in_the_completion():
    params, key = dataclasses.replace(LONG, top_p=0.95), SamplingKey(9, 8, 7, 6, 5)
    drawing = engine(shared())
    (sample,) = drawing.generate([PROMPT], params, [key])
    logits = drawing.logits([*PROMPT, *sample.completion_ids], len(PROMPT) - 1)[:-1]
    keys = torch.tensor([sampling.pack_key(key, place) for place in range(40)])
    leaf_size = shared().head.spec.out_leaf_size
    drawn = sampling.sample(torch.from_numpy(logits), sampling.SamplingRows.of([params], [40]), keys, leaf_size)
    assert drawn.ids.tolist() == sample.completion_ids.tolist()
    assert_same_bits(drawn.logp, sample.logprobs)


def test_group_members_are_distinct_and_reproducible():
    group = engine(shared()).generate([PROMPT, PROMPT], LONG, num_samples=4)
    assert len({tuple(s.completion_ids.tolist()) for s in group}) == 8
    assert [(s.key.prompt, s.key.sample) for s in group] == [(p, n) for p in range(2) for n in range(4)]
    assert_same_samples(engine(shared()).generate([PROMPT, PROMPT], LONG, num_samples=4), group)


def test_kept_sets_are_recorded_only_where_ids_may_be_excluded():
    params = [SamplingParams(max_tokens=6, stop_token_ids=()), SamplingParams(top_k=3, max_tokens=6, stop_token_ids=())]
    plain, filtered = engine(shared()).generate([PROMPT, PROMPT], params)
    assert plain.kept_counts is None
    assert filtered.kept_counts.tolist() == [3] * 6
    assert filtered.kept_digests.dtype == np.uint64
    assert len(set(filtered.kept_digests.tolist())) > 1


def test_a_drawn_token_outside_the_most_likely_ones_has_its_own_log_prob():
    hot = engine(shared())
    (sample,) = hot.generate([PROMPT], dataclasses.replace(LONG, temperature=1.5))
    logits = hot.logits([*PROMPT, *sample.completion_ids], len(PROMPT) - 1)[:-1].astype(np.float64) / 1.5
    rank = (logits > np.take_along_axis(logits, sample.completion_ids[:, None].astype(np.int64), 1)).sum(1)
    assert rank.max() >= 5
    normed = logits - logits.max(1, keepdims=True)
    logp = normed - np.log(np.exp(normed).sum(1, keepdims=True))
    expected = np.take_along_axis(logp, sample.completion_ids[:, None].astype(np.int64), 1)[:, 0]
    # z / T, difference to the maximum and log, each rounded to FP32 at magnitudes below 16; the sum as above.
    assert np.abs(sample.logprobs - expected).max() < 2.0**-16


def test_sampling_defaults_of_a_model_folder_have_no_way_in(tmp_path):
    folder = write_random_model(tmp_path / "model", tiny_spec(), seed=1)
    plain = engine(load(folder)).generate([PROMPT], SamplingParams(), num_samples=4)
    defaults = {"repetition_penalty": 1.3, "top_k": 3, "top_p": 0.5, "temperature": 0.2, "max_new_tokens": 4}
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | defaults | {"do_sample": True}))
    assert open_model(folder).generation_config["top_k"] == 3
    assert_same_samples(engine(load(folder)).generate([PROMPT], SamplingParams(), num_samples=4), plain)
    assert plain[0].kept_counts is None


def load(folder):
    files = open_model(folder)
    return Decoder(files.spec, preset("bf16")).load(files.tensors())


# ---- weights


def change(decoder, seed):
    """What an optimizer step does: other published values in place, one more version."""
    generator = torch.Generator().manual_seed(seed)
    for handle in decoder.weights.values():
        handle.load(handle.value().float() * (1 + 0.3 * torch.randn(handle.spec.shape, generator=generator)))
    decoder.version += 1


def test_after_an_update_a_warm_engine_equals_a_cold_one():
    decoder = build()
    warm = engine(decoder)
    before = warm.generate([PROMPT * 8], LONG, num_samples=3)
    change(decoder, 1)
    warm.update_weights(decoder)
    after = warm.generate([PROMPT * 8], LONG, num_samples=3)
    assert_same_samples(after, engine(decoder).generate([PROMPT * 8], LONG, num_samples=3))
    assert [set(s.versions.tolist()) for s in before] == [{0}] * 3
    assert [set(s.versions.tolist()) for s in after] == [{1}] * 3
    assert [s.completion_ids.tolist() for s in before] != [s.completion_ids.tolist() for s in after]


def test_changed_weights_without_update_are_refused():
    decoder = build()
    stale = engine(decoder)
    decoder.version += 1
    with pytest.raises(ConfigError, match="call update_weights after optim_step"):
        stale.generate([PROMPT], LONG)
    with pytest.raises(ConfigError, match="call update_weights after optim_step"):
        stale.score(PROMPT, [1, 2], LONG)
    stale.update_weights(decoder)
    assert len(stale.generate([PROMPT], LONG)) == 1


def test_other_weights_under_the_same_version_are_refused_until_taken_over():
    decoder, other = build(), build(seed=1)
    stale = engine(decoder)
    stale.generate([PROMPT * 8], LONG)
    decoder.load([(name, handle.value()) for name, handle in other.weights.items()])
    with pytest.raises(ConfigError, match="call update_weights after load"):
        stale.generate([PROMPT * 8], LONG)
    stale.update_weights(decoder)
    assert_same_samples(stale.generate([PROMPT * 8], LONG), engine(other).generate([PROMPT * 8], LONG))


def test_an_update_in_the_middle_of_a_completion_recomputes_its_keys_and_values():
    decoder = build()
    running = engine(decoder)
    prompt = PROMPT * 7
    stream = running.stream([prompt], LONG)
    events = [next(stream) for _ in range(20)]
    change(decoder, 1)
    running.update_weights(decoder)
    events += stream
    drawn = [e.token for e in events]
    # The rest is what a cold engine at the new weights draws after the same tokens: its log-probs are the proof.
    scores = engine(decoder).score(prompt, drawn, LONG)
    assert scores[20:].tolist() == [e.logprob for e in events[20:]]
    assert scores[:20].tolist() != [e.logprob for e in events[:20]]


def test_versions_say_which_weights_drew_each_token():
    decoder = build()
    running = engine(decoder)

    def update(progress):
        if progress.tokens == 10:
            decoder.version += 1
            running.update_weights(decoder)

    (sample,) = running.generate([PROMPT], LONG, progress=update)
    assert sample.versions.tolist() == [0] * 10 + [1] * 30
    (constant,) = engine(build()).generate([PROMPT], LONG)
    assert_same_samples([sample], [constant])  # the weights were the same after all


def test_an_update_takes_a_trainer_or_a_decoder_and_refuses_what_does_not_fit():
    decoder = build()
    running = Engine.for_trainer(Trainer(decoder), kv_cache_bytes=1 << 20)
    assert running.decoder is decoder
    before = running.generate([PROMPT], LONG)
    other = build(seed=1)
    running.update_weights(Trainer(other))
    assert_same_samples(running.generate([PROMPT], LONG), engine(other).generate([PROMPT], LONG))
    assert before[0].completion_ids.tolist() != running.generate([PROMPT], LONG)[0].completion_ids.tolist()
    with pytest.raises(ContractError, match="kv_split"):
        running.update_weights(Decoder(decoder.spec, preset("bf16", kv_split=256)))
    with pytest.raises(ConfigError, match="same model"):
        running.update_weights(build(num_layers=1))


@dataclasses.dataclass
class Trainer:
    decoder: Decoder


def test_resetting_the_prefix_cache_forgets_prefixes():
    warm = engine(shared())
    prompt = PROMPT * 10
    first = warm.generate([prompt], LONG)
    warm.reset_prefix_cache()
    assert_same_samples(warm.generate([prompt], LONG), first)
    assert warm.statistics.cache_hit_tokens == 0
    warm.generate([prompt], LONG)
    assert warm.statistics.cache_hit_tokens == 48


# ---- limits, before any work


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        ({"prompts": [[]]}, ConfigError, r"prompts\[0\].*non-empty"),
        ({"prompts": [PROMPT, [VOCAB]]}, ConfigError, r"prompts\[1\].*0 to 319"),
        ({"prompts": [PROMPT, [-1]]}, ConfigError, r"prompts\[1\].*0 to 319"),
        ({"prompts": [[0.5]]}, ConfigError, "token ids"),
        ({"prompts": PROMPT}, ConfigError, "give a list of prompts"),
        ({"prompts": [PROMPT, 7]}, ConfigError, r"prompts\[1\] = 7"),
        ({"prompts": "HELLO"}, ConfigError, "give a list of prompts"),
        ({"prompts": ["HELLO"]}, ConfigError, "no tokenizer"),
        ({"prompts": [PROMPT], "params": dataclasses.replace(LONG, stop=("x",))}, ConfigError, "need a tokenizer"),
        ({"prompts": [PROMPT], "params": [LONG, LONG]}, ConfigError, "one per prompt"),
        ({"prompts": [PROMPT], "keys": []}, ConfigError, "one per prompt"),
        ({"prompts": [PROMPT] * 2, "keys": [SamplingKey()] * 2}, ConfigError, "two samples share it"),
        (
            {"prompts": [PROMPT] * 9, "keys": [SamplingKey(prompt=i) for i in range(8)] + [SamplingKey(sample=-1)]},
            ConfigError,
            "sampling key sample",
        ),
        ({"prompts": [PROMPT], "num_samples": 0}, ConfigError, "num_samples"),
        ({"prompts": [PROMPT * 100, PROMPT], "params": SamplingParams(max_tokens=13)}, ConfigError, "max_tokens <= 12"),
    ],
)
def test_what_cannot_be_honoured_is_refused_before_work_starts(call, error, match):
    idle = engine(shared())
    with pytest.raises(error, match=match):
        idle.generate(**({"params": LONG} | call))
    assert idle.statistics.steps == 0
    assert len(idle.generate([PROMPT], SamplingParams(max_tokens=2))) == 1


def test_the_last_position_of_the_model_is_used():
    params = SamplingParams(max_tokens=12, stop_token_ids=())
    (sample,) = engine(shared()).generate([PROMPT * 100], params)
    assert len(sample.prompt_ids) + len(sample.completion_ids) == POSITIONS
    scores = engine(shared()).score(sample.prompt_ids, sample.completion_ids, params)
    assert scores.tobytes() == sample.logprobs.tobytes()


def test_a_request_that_can_never_fit_names_the_numbers():
    decoder = shared()
    page = decoder.codec().bytes_per_token() * 16 * decoder.spec.num_layers
    tight = engine(decoder, kv_cache_bytes=4 * page)
    assert len(tight.generate([[1] * 60], SamplingParams(max_tokens=5, stop_token_ids=()))[0].completion_ids) == 5
    with pytest.raises(CapacityError, match=rf"65 tokens \(5 pages of 16, {5 * page} bytes\).*4 pages.*raise kv_cache"):
        tight.generate([[1] * 60], SamplingParams(max_tokens=6))


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"page_size": 24}, ConfigError, "multiple of 16"),
        ({"page_size": 0}, ConfigError, "multiple of 16"),
        ({"kv_cache_bytes": 100}, CapacityError, "kv_cache_bytes = 100 does not hold one page"),
        ({"max_sequences": 0}, ConfigError, "at least 1"),
        ({"max_sequences": 8, "max_batch_tokens": 7}, ConfigError, "at least max_sequences"),
    ],
)
def test_settings_out_of_range_are_refused(settings, error, match):
    with pytest.raises(error, match=match):
        engine(shared(), **settings)


def test_logits_that_are_not_finite_are_refused_by_name():
    decoder = build()
    sick = engine(decoder)
    norm = decoder.weights["model.norm.weight"]
    healthy = norm.value().clone()
    norm.load(torch.full(norm.spec.shape, float("inf")))
    with pytest.raises(NonFiniteError, match=r"request 0.*completion token 0"):
        sick.generate([PROMPT], LONG)
    norm.load(healthy)
    assert_same_samples(sick.generate([PROMPT], LONG), engine(build()).generate([PROMPT], LONG))


# ---- streams, progress, statistics


def test_a_stream_gives_every_token_with_its_text():
    speaking = engine(shared(), tokenizer=Letters())
    (sample,) = speaking.generate([PROMPT], LONG)
    events = list(speaking.stream([PROMPT], LONG))
    assert [e.token for e in events] == sample.completion_ids.tolist()
    assert "".join(e.text for e in events) == sample.text
    assert [e.finish_reason for e in events] == [None] * 39 + ["length"]


def test_closing_a_stream_aborts_its_requests_and_frees_their_pages():
    idle = engine(shared())
    stream = idle.stream([PROMPT, PROMPT], LONG)
    next(stream)
    stream.close()
    idle.stream([PROMPT, PROMPT], LONG).close()  # never iterated
    assert idle.step() == []
    assert idle._scheduler.pool.held == 0


def test_an_interrupt_leaves_an_engine_that_works():
    idle = engine(shared())

    def interrupt(progress):
        if progress.tokens > 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        idle.generate([PROMPT] * 4, LONG, progress=interrupt)
    assert idle.step() == []
    assert idle._scheduler.pool.held == 0
    assert_same_samples(idle.generate([PROMPT], LONG), engine(shared()).generate([PROMPT], LONG))


def test_pages_of_a_step_that_failed_are_not_found_again():
    def fail(name, outputs, info):
        if name == "sample":
            raise RuntimeError("planted")
        if name == "attention":
            outputs["out"].zero_()  # later layers keep wrong keys and values

    idle, prompt = engine(shared()), PROMPT * 10
    with tap.listen(fail), pytest.raises(RuntimeError, match="planted"):
        idle.generate([prompt], LONG)
    assert_same_samples(idle.generate([prompt], LONG), engine(shared()).generate([prompt], LONG))
    assert idle.statistics.cache_hit_tokens == 0


def test_progress_counts_samples_and_tokens():
    seen = []
    engine(shared(), max_sequences=2).generate(
        [PROMPT] * 5, dataclasses.replace(LONG, max_tokens=3), progress=seen.append
    )
    assert (seen[-1].finished, seen[-1].total, seen[-1].tokens) == (5, 5, 15)
    assert [p.tokens for p in seen] == sorted(p.tokens for p in seen)
    assert all(p.tokens_per_second > 0 for p in seen)


def test_statistics_count_rows():
    counted = engine(shared(), prefix_cache=False)
    counted.generate([PROMPT, PROMPT * 2], dataclasses.replace(LONG, max_tokens=4))
    statistics = counted.statistics
    assert (statistics.prefill_tokens, statistics.decode_tokens, statistics.steps) == (15, 6, 4)
    assert statistics.prefill_seconds > 0
    assert statistics.decode_seconds > 0
    assert (statistics.cache_hit_tokens, statistics.preemptions) == (0, 0)


def test_many_generations_leave_no_page_and_no_key_behind():
    small = engine(shared(), kv_cache_bytes=1 << 18)
    rng = np.random.default_rng(0)
    for _ in range(30):
        prompts = [rng.integers(0, VOCAB, rng.integers(1, 40)).tolist() for _ in range(6)]
        small.generate(prompts, SamplingParams(max_tokens=int(rng.integers(1, 12))))
        pool = small._scheduler.pool
        pool.check()
        assert pool.held == 0
