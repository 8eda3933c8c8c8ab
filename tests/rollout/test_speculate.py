"""What is guessed, how much of it is computed, and what is kept of earlier texts. Nothing here decides a token."""

import math

import numpy as np
import pytest

from tests.rollout.tiny_models import engine, shared
from zerogap.errors import ConfigError
from zerogap.models import memory
from zerogap.numerics import preset
from zerogap.rollout import draft_texts, speculate
from zerogap.rollout.draft_texts import PROMPT_CHANCE, PromptTexts, TextStore
from zerogap.rollout.sequence import Request, Sequence
from zerogap.rollout.speculate import PassCost, Speculation, Speculator
from zerogap.types import SamplingKey, SamplingParams

PROMPT = np.array([1, 2, 3, 4, 5], np.int32)
COST = PassCost(10.5)


def ids(*values):
    return np.array(values, np.int32)


def logs(*chances):
    return np.log(np.array(chances, np.float32))


def grow(texts, *tokens, chance=0.9):
    text = texts.new_text()
    for token in tokens:
        texts.grow(text, token, chance)
    return text


def running(*drawn, prompt=PROMPT, max_tokens=40, chances=0.9, index=0, **params):
    """A sequence that has computed all but its newest token."""
    request = Request(prompt, SamplingParams(max_tokens=max_tokens, **params), SamplingKey(sample=index), frozenset())
    sequence = Sequence.of(index, request)
    for token in drawn:
        sequence.append(token, math.log(chances), 0)
    sequence.computed = sequence.length - 1
    return sequence


def guesser(settings):
    return Speculator(settings, COST)


def guessed(sequence):
    return sequence.ids[sequence.length : sequence.length + sequence.drafts].tolist()


# ---- places in texts


def test_the_longest_agreement_is_found_and_only_where_something_follows():
    texts = PromptTexts(PROMPT, 2)
    first = grow(texts, 7, 8, 9, 10)
    second = grow(texts, 6, 8, 9, 11)
    mine = grow(texts, 3, 6, 8, 9)
    places, length = texts.matches(mine)
    assert [(text is second, index) for text, index in places] == [(True, 8)] and length == 3
    places, length = texts.matches(grow(texts, 8, 9))
    assert {(id(text), index) for text, index in places} == {(id(first), 8), (id(second), 8)} and length == 2
    assert texts.matches(grow(texts, 9, 8)) == ([], 0)
    assert texts.matches(grow(texts, 9, 10)) == ([], 0), "nothing follows these two anywhere"


def test_the_prompt_and_the_own_text_are_copied_from_too():
    texts = PromptTexts(PROMPT, 2)
    ((text, index),), length = texts.matches(grow(texts, 2, 3))
    assert (text.ids[index], text.chances[index], length) == (4, PROMPT_CHANCE, 2)
    mine = grow(texts, 20, 21, 22, 20, 21)
    assert texts.matches(mine) == ([(mine, 7)], 2)


@pytest.mark.parametrize("min_match", [1, 3])
def test_fewer_tokens_than_asked_for_are_no_match(min_match):
    texts = PromptTexts(PROMPT, min_match)
    grow(texts, 7, 8, 9)
    assert bool(texts.matches(grow(texts, 6, 8))[0]) == (min_match == 1)
    assert PromptTexts(ids(4), min_match).matches(grow(PromptTexts(ids(4), min_match))) == ([], 0)


def test_of_a_common_run_the_newest_places_stay():
    texts = PromptTexts(PROMPT, 1)
    for token in range(100):
        grow(texts, 50, token)
    places, _ = texts.matches(grow(texts, 50))
    assert len(places) <= draft_texts.MOST_PLACES
    assert places[-1][0].ids[-1] == 99


# ---- the store


def test_texts_outlive_the_sequences_that_drew_them():
    store = TextStore(2)
    texts = store.open(PROMPT)
    assert store.open(PROMPT) is texts
    grow(texts, 7, 8, chance=0.25)
    store.close(PROMPT)
    assert store.open(PROMPT) is texts and store.num_tokens == 0
    for _ in range(2):
        store.close(PROMPT)
    assert store.num_tokens == len(PROMPT) + 2
    again = store.open(PROMPT)
    assert again is not texts and [t.ids for t in again.texts] == [[*PROMPT, 7, 8]]
    assert again.texts[0].chances[-1] == 0.25
    assert not store.open(ids(1, 2, 3, 4)).texts, "another prompt"


def test_equal_texts_are_kept_once_and_of_many_the_newest():
    store = TextStore(2)
    texts = store.open(PROMPT)
    for token in (*range(40), 39, 38):
        grow(texts, token)
    grow(texts)  # nothing was drawn
    store.close(PROMPT)
    kept = [t.ids[-1] for t in store.open(PROMPT).texts]
    assert kept == [*range(40 - draft_texts.TEXTS_PER_PROMPT, 38), 39, 38]


def test_the_least_recently_used_prompt_goes_first():
    store = TextStore(2, stored_tokens=25)
    for first in (1, 2, 3):
        store.add(ids(first, 9, 9), ids(5, 6, 7, 8), logs(1, 1, 1, 1))
        assert store.num_tokens == 7 * first
    store.open(ids(1, 9, 9))
    store.close(ids(1, 9, 9))  # used last
    store.add(ids(4, 9, 9), ids(5, 6, 7, 8), logs(1, 1, 1, 1))
    assert store.num_tokens == 21
    assert [len(store.open(ids(first, 9, 9)).texts) for first in (1, 2, 3, 4)] == [1, 0, 1, 1]
    store.add(PROMPT, np.arange(30, dtype=np.int32), np.zeros(30, np.float32))
    assert store.num_tokens == 0 and not store.open(PROMPT).texts, "one text larger than the store"


def test_what_is_added_while_a_prompt_is_in_use_joins_it_later():
    store = TextStore(2)
    grow(store.open(PROMPT), 7)
    store.add(PROMPT, ids(8), logs(0.5))
    store.close(PROMPT)
    assert [t.ids[-1] for t in store.open(PROMPT).texts] == [8, 7]


# ---- guesses


def test_an_earlier_completion_is_followed_while_it_agrees():
    speculator = guesser(Speculation(4, always=True))
    speculator._store.add(PROMPT, ids(10, 11, 12, 13, 14, 15, 16), logs(*[0.9] * 7))
    speculator._store.add(PROMPT, ids(10, 21, 22, 23, 24), logs(0.9, 0.95, 0.9, 0.9, 0.9))
    mine = running(10)
    speculator.propose([mine])
    assert guessed(mine) == [21, 22, 23, 24], "the likelier branch"
    mine.append(11, -0.1, 0)
    mine.computed += 1
    speculator.propose([mine])
    assert guessed(mine) == [12, 13, 14, 15]


def test_samples_of_the_group_are_followed_while_they_grow():
    speculator = guesser(Speculation(4, always=True))
    ahead, behind = running(10, 11, 12, 13), running(10, 11, index=1)
    speculator.propose([ahead, behind])
    assert guessed(ahead) == [] and guessed(behind) == [12, 13]


@pytest.mark.parametrize("left", [1, 2, 4])
def test_no_guess_lies_behind_the_last_token(left):
    speculator = guesser(Speculation(16, always=True))
    speculator._store.add(PROMPT, ids(*range(10, 40)), np.zeros(30, np.float32))
    mine = running(10, max_tokens=1 + left)
    speculator.propose([mine])
    assert mine.drafts == left - 1


def test_a_sequence_that_has_more_than_one_token_to_compute_is_left_alone():
    speculator = guesser(Speculation(4, always=True))
    speculator._store.add(PROMPT, ids(10, 11, 12), logs(1, 1, 1))
    mine, fresh = running(10), running()
    mine.computed, mine.drafts = 0, 3
    speculator.propose([mine, fresh])
    assert (mine.drafts, fresh.drafts) == (0, 0)


@pytest.mark.parametrize(("sequences", "expected"), [(1, 4), (8, 2), (16, 1), (60, 0)])
def test_the_more_sequences_the_likelier_a_guess_must_be(sequences, expected):
    """Chances 0.81, 0.66, 0.53, 0.43 for each, against 0.04, 0.24, 0.39 and 1 at first; 0.98 from 18 rows on."""
    speculator = guesser(Speculation(4))
    together = [running(10, prompt=np.append(PROMPT, i).astype(np.int32), index=i) for i in range(sequences)]
    for sequence in together:
        prompt = sequence.ids[: sequence.prompt_length]
        speculator._store.add(prompt, ids(10, 11, 12, 13, 14), logs(0.9, *[0.81] * 4))
    speculator.propose(together)
    assert {s.drafts for s in together[:1]} == {expected}


def test_the_number_of_rows_minimises_the_cost_of_a_token():
    speculator = guesser(Speculation(8))
    mine, other = running(10), running(30, prompt=ids(9, 9, 9), index=1)
    speculator._store.add(PROMPT, ids(10, *range(50, 58)), logs(*[0.9] * 9))
    speculator._store.add(ids(9, 9, 9), ids(30, *range(50, 58)), logs(*[0.5] * 9))
    speculator.propose([mine, other])

    def cost(a, b):
        tokens = sum(0.9**i for i in range(a + 1)) + sum(0.5**i for i in range(b + 1))
        return COST(2 + a + b) / tokens

    best = min((cost(a, b), a, b) for a in range(9) for b in range(9))
    assert (mine.drafts, other.drafts) == best[1:] and best[1] > best[2] > 0


def test_one_pass_never_computes_more_guesses_than_the_buffers_hold():
    speculator = guesser(Speculation(16, always=True))
    speculator._store.add(PROMPT, ids(*range(10, 40)), np.zeros(30, np.float32))
    together = [running(10, index=i) for i in range(12)]
    speculator.propose(together)
    assert sum(s.drafts for s in together) == speculate.DRAFT_ROWS == memory.DRAFT_ROWS
    assert Speculation(16).most_rows(12) == 12 + speculate.DRAFT_ROWS
    assert (Speculation(2).most_rows(12), Speculation().most_rows(12)) == (36, 12)


def test_a_kind_of_guess_that_is_always_wrong_is_given_up_and_tried_again_later():
    speculator = guesser(Speculation(4))
    speculator._store.add(PROMPT, ids(10, 11, 12, 13, 14), logs(*[0.9] * 5))
    mine = running(10)
    passes = 0
    while speculator.propose([mine]) or mine.drafts:
        speculator.verified(mine, 1, 0)
        passes += 1
        assert passes < 500
    assert passes > 10
    for _ in range(5000):
        speculator.propose([mine])
        if mine.drafts:
            break
    assert mine.drafts > 0


def test_greedy_drawing_repeats_what_was_likely():
    """At temperature 0 a token that was drawn in most cases is certain, however long the run of them."""
    drafts = []
    for temperature in (0.0, 1.0):
        speculator = guesser(Speculation(16))
        speculator._store.add(PROMPT, ids(*range(10, 30)), logs(*[0.6] * 20))
        mine = running(10, temperature=temperature)
        speculator.propose([mine])
        drafts.append(mine.drafts)
    assert drafts[0] == 16 > drafts[1] > 0


@pytest.mark.parametrize(("name", "one"), [("bf16", 10.9), ("fp32", 10.9), ("fp8-kv", 7.1)])
def test_a_pass_costs_its_rows_once_there_are_enough(name, one):
    cost = PassCost.under(preset(name))
    assert round(cost(1), 1) == one
    assert [cost(r) for r in (18, 64)] == [18, 64]
    steps = [cost(r + 1) - cost(r) for r in range(1, 40)]
    assert np.diff(steps).min() > -1e-12 and 0 < steps[0] < 1 == steps[-1], (
        "convex: what is chosen greedily is the optimum"
    )


# ---- the engine's part


def test_counts_add_up():
    guessing = engine(shared(), speculation=Speculation(8, 1, always=True))
    params = SamplingParams(temperature=0.3, max_tokens=30, stop_token_ids=())
    drawn = sum(
        len(s.completion_ids) for step in range(2) for s in guessing.generate([[5, 6, 7]], params, num_samples=4)
    )
    counts = guessing.statistics
    assert counts.decode_tokens + counts.accepted_tokens + 8 == drawn, "the first token of each comes from its prompt"
    assert counts.accepted_tokens < counts.draft_tokens
    assert counts.plain_cost > counts.decode_cost > 0


def test_without_speculation_nothing_is_remembered_or_counted():
    plain = engine(shared())
    (sample,) = plain.generate([[5, 6, 7]], SamplingParams(max_tokens=4, stop_token_ids=()))
    plain.remember([sample])
    assert plain._speculator is None
    assert (plain.statistics.draft_tokens, plain.statistics.accepted_tokens) == (0, 0)
    assert plain.statistics.plain_cost == plain.statistics.decode_cost


def test_finished_and_aborted_sequences_are_followed_no_more():
    guessing = engine(shared(), speculation=Speculation(4))
    params = SamplingParams(max_tokens=10, stop_token_ids=())
    guessing.generate([[5, 6, 7]], params, num_samples=3)
    stream = guessing.stream([[5, 6, 7]], params, num_samples=3)
    next(stream), next(stream), next(stream), next(stream)
    assert len(guessing._speculator._followers) == 3
    stream.close()
    assert not guessing._speculator._followers and not guessing._speculator._store._in_use
    assert guessing._speculator._store.num_tokens > 30


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"draft_tokens": 17}, "speculation.draft_tokens = 17: choose 0"),
        ({"draft_tokens": -1}, "speculation.draft_tokens"),
        ({"min_match": 0}, "speculation.min_match"),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        Speculation(**fields)
