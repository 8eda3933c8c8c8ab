"""The scheduler alone: order, chunks, sharing, preemption, and no page lost. Forward passes are played by hand."""

import itertools
import random

import numpy as np
import pytest

from zerogap.rollout.pages import PagePool
from zerogap.rollout.scheduler import Scheduler
from zerogap.rollout.sequence import Request, Sequence
from zerogap.types import SamplingKey, SamplingParams


def make(num_pages=64, page_size=16, tokens=64, sequences=4, prefix_cache=True):
    pool = PagePool(num_pages, page_size, prefix_cache)
    return Scheduler(pool, np.zeros((sequences, num_pages), np.int32), tokens, sequences)


def request(index, prompt, max_tokens=8):
    params = SamplingParams(max_tokens=max_tokens)
    return Sequence.of(index, Request(np.asarray(prompt, np.int32), params, SamplingKey(prompt=index), frozenset()))


def play(scheduler, chunks, contents=None):
    """What a forward pass does to the sequences; `contents` plays the cache and checks what every row would read."""
    page_size = scheduler.pool.page_size
    if contents is not None:
        for sequence, start, count, _ in chunks:
            for p in range(start, start + count):
                page = scheduler.page_table[sequence.slot, p // page_size]
                contents[page * page_size + p % page_size] = hash(sequence.ids[: p + 1].tobytes())
        for sequence, start, count, _ in chunks:
            for p in range(start + count):
                page = scheduler.page_table[sequence.slot, p // page_size]
                assert contents[page * page_size + p % page_size] == hash(sequence.ids[: p + 1].tobytes())
    for chunk in chunks:
        sequence, draws = chunk.sequence, chunk.draws
        sequence.computed += chunk.size - chunk.drafts
        for ahead in range(chunk.drafts + 1 if draws else 0):
            guess = int(sequence.ids[sequence.length]) if ahead < chunk.drafts else None
            sequence.append(following(sequence, sequence.ids[sequence.length - 1]), -1.0, 0)
            sequence.computed += ahead > 0
            if sequence.finish_reason or sequence.ids[sequence.length - 1] != guess:
                break
        if sequence.finish_reason:
            scheduler.release(sequence)


def following(sequence, token):
    return int(token) * 7 % 101 + sequence.index


def guess_tokens(scheduler, rng):
    """Up to five guesses behind what is known, each right in three of four cases."""
    guessed = 0
    for sequence in scheduler.running:
        room = sequence.params.max_tokens - sequence.num_drawn - 1
        ready = sequence.length - sequence.computed == 1
        sequence.drafts = rng.randrange(min(5, room) + 1) if ready else 0
        for place in range(sequence.length, sequence.length + sequence.drafts):
            right = following(sequence, sequence.ids[place - 1])
            sequence.ids[place] = right if rng.random() < 0.75 else right + 1
        guessed += sequence.drafts
    return guessed


def finish(scheduler, contents=None, limit=10_000):
    steps = []
    while chunks := scheduler.schedule():
        steps.append([(c.sequence.index, c.start, c.size) for c in chunks])
        assert 0 < sum(c.size for c in chunks) <= scheduler.max_batch_tokens
        assert len(scheduler.running) <= len(scheduler.page_table)
        play(scheduler, chunks, contents)
        scheduler.pool.check()
        assert len(steps) < limit, "the scheduler makes no progress"
    assert not scheduler.waiting
    assert not scheduler.running
    assert scheduler.pool.held == 0, "a page is still held although nothing runs"
    return steps


def test_a_long_prompt_is_computed_in_chunks_and_decode_rows_ride_along():
    scheduler = make(tokens=20)
    scheduler.add(request(0, [1] * 5, max_tokens=4))
    scheduler.add(request(1, range(2, 42), max_tokens=2))
    steps = finish(scheduler)
    assert steps == [
        [(0, 0, 5), (1, 0, 15)],
        [(0, 5, 1), (1, 15, 19)],
        [(0, 6, 1), (1, 34, 6)],
        [(0, 7, 1), (1, 40, 1)],
    ]


def test_a_long_prompt_never_keeps_running_sequences_waiting():
    scheduler = make(tokens=8, sequences=8)
    for index in range(8):
        scheduler.add(request(index, [index] * (40 if index % 2 else 1), max_tokens=6))
    steps = finish(scheduler)
    for before, after in itertools.pairwise(steps):
        computed = {index for index, _, _ in after}
        assert all(index in computed or start + size in (6, 45) for index, start, size in before)


def test_group_members_share_the_full_pages_of_their_prompt_in_the_very_first_step():
    scheduler = make(tokens=64)
    for index in range(4):
        scheduler.add(request(index, range(37)))
    chunks = scheduler.schedule()
    assert [(c.start, c.size) for c in chunks] == [(0, 37), (32, 5), (32, 5), (32, 5)]
    assert len({tuple(c.sequence.pages[:2]) for c in chunks}) == 1
    assert len({c.sequence.pages[2] for c in chunks}) == 4  # the ragged last page is everybody's own
    assert scheduler.cache_hit_tokens == 96
    assert scheduler.pool.held == 2 + 4


@pytest.mark.parametrize(("length", "hit"), [(15, 0), (16, 0), (17, 16), (32, 16), (33, 32)])
def test_the_last_prompt_token_is_always_computed(length, hit):
    scheduler = make(tokens=128, sequences=2)
    scheduler.add(request(0, range(length)))
    finish(scheduler)
    scheduler.add(request(1, range(length)))
    (chunk,) = scheduler.schedule()
    assert (chunk.start, chunk.size) == (hit, length - hit)
    assert chunk.draws


def test_other_weights_find_no_page():
    scheduler = make(tokens=128)
    scheduler.root_key = b"version 0"
    scheduler.add(request(0, range(40)))
    finish(scheduler)
    scheduler.root_key = b"version 1"
    scheduler.add(request(1, range(40)))
    assert scheduler.schedule()[0].start == 0


def test_when_pages_run_out_the_latest_sequence_starts_again():
    scheduler = make(num_pages=5, tokens=64, sequences=2, prefix_cache=False)
    scheduler.add(request(0, [1] * 30, max_tokens=40))
    scheduler.add(request(1, [2] * 15, max_tokens=40))
    order = [[(c[0], c[1]) for c in step] for step in finish(scheduler)]
    assert scheduler.preemptions == 1
    alone = [step for step in order if len(step) == 1]
    assert alone[0][0][0] == 0  # the first one went on alone
    restart = next(i for i, step in enumerate(order) if (1, 0) in step[:1] and i > 0)
    assert all(index == 1 for step in order[restart:] for index, _ in step)


def test_a_sequence_that_needs_a_page_itself_yields_to_earlier_ones():
    scheduler = make(num_pages=4, tokens=64, sequences=2, prefix_cache=False)
    scheduler.add(request(0, [1] * 20, max_tokens=30))
    scheduler.add(request(1, [2] * 16, max_tokens=30))
    steps = finish(scheduler)
    assert scheduler.preemptions == 1
    assert steps[0] == [(0, 0, 20)] or steps[0] == [(0, 0, 20), (1, 0, 16)]


def test_a_preempted_sequence_finds_its_own_published_pages_again():
    scheduler = make(num_pages=6, tokens=64, sequences=2)
    scheduler.add(request(0, [1] * 33, max_tokens=40))
    scheduler.add(request(1, [2] * 17, max_tokens=20))
    contents = {}
    finish(scheduler, contents)
    assert scheduler.preemptions >= 1
    assert scheduler.cache_hit_tokens >= 16


def test_dropping_all_keys_and_values_restarts_running_sequences_in_order():
    scheduler = make(tokens=64)
    for index in range(3):
        scheduler.add(request(index, [index] * 20))
    play(scheduler, scheduler.schedule())
    play(scheduler, scheduler.schedule())
    scheduler.drop_all()
    assert [s.index for s in scheduler.waiting] == [0, 1, 2]
    assert scheduler.pool.held == 0
    chunks = scheduler.schedule()
    assert [(c.sequence.index, c.start, c.size) for c in chunks] == [(0, 0, 22), (1, 0, 22), (2, 0, 20)]
    play(scheduler, chunks)
    finish(scheduler)
    scheduler.add(request(3, [1] * 20))
    assert scheduler.schedule()[0].start == 16  # what was computed again is found again


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("speculates", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_thousand_random_requests_leave_no_page_behind_and_read_only_what_is_theirs(seed, speculates, prefix_cache):
    rng = random.Random(seed)
    scheduler = make(num_pages=14, tokens=rng.choice([8, 33, 200]), sequences=8, prefix_cache=prefix_cache)
    contents: dict = {}
    guessed = verified = 0
    pending = list(range(250))
    alive = []
    while pending or scheduler.waiting or scheduler.running:
        for _ in range(rng.randrange(3)):
            if pending:
                shared = [rng.randrange(2)] * rng.randrange(40)
                prompt = shared + [rng.randrange(3) for _ in range(rng.randrange(1, 60))]
                alive.append(request(pending.pop(), prompt, max_tokens=rng.randrange(1, 60)))
                alive[-1].index = 250 - len(pending)
                scheduler.add(alive[-1])
        if rng.random() < 0.02 and (scheduler.running or scheduler.waiting):
            scheduler.release(rng.choice([*scheduler.running, *scheduler.waiting]))
        if rng.random() < 0.01:
            scheduler.drop_all()
        guessed += guess_tokens(scheduler, rng) if speculates else 0
        chunks = scheduler.schedule()
        verified += sum(chunk.drafts for chunk in chunks)
        assert sum(chunk.size for chunk in chunks) <= scheduler.max_batch_tokens
        play(scheduler, chunks, contents)
        scheduler.pool.check()
        order = [s.index for s in [*scheduler.running, *scheduler.waiting]]
        assert order == sorted(order)
    finish(scheduler)
    assert scheduler.preemptions > 0
    assert (scheduler.cache_hit_tokens > 0) == prefix_cache
    assert (0 < verified < guessed) == speculates


def test_guesses_preempt_nobody_and_leave_a_token_for_every_sequence():
    scheduler = make(num_pages=5, tokens=8, sequences=2, prefix_cache=False)
    for index in range(2):
        scheduler.add(request(index, [index + 1] * 3, max_tokens=60))
    for _ in range(2):
        play(scheduler, scheduler.schedule())
    for sequence in scheduler.running:
        sequence.drafts = 16
    chunks = scheduler.schedule()
    assert [(c.size, c.drafts, c.draws) for c in chunks] == [(7, 6, True), (1, 0, True)]
    assert scheduler.pool.held == 2
    play(scheduler, chunks)
    scheduler.max_batch_tokens = 64
    assert scheduler.running[0].length == 6
    for sequence in scheduler.running:
        sequence.drafts = 50
    chunks = scheduler.schedule()
    assert [c.drafts for c in chunks] == [26, 10]  # one more page for the first; two stay free for both
    assert scheduler.pool.available == 2 and scheduler.preemptions == 0
