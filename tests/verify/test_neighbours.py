"""The search for neighbours: the same trials anywhere, every border among them; what is found is made small."""

import dataclasses

import pytest

from tests.tiny import tiny_decoder
from zerogap.ops import tap
from zerogap.verify import neighbours
from zerogap.verify.checks import Tally
from zerogap.verify.faults import fault, planted
from zerogap.verify.ladder import subject_for
from zerogap.verify.neighbours import Neighbour, Trial, alone, attempt, draw_trials, search, trials_digest

PLAIN = Trial("rollout", (0,), (), (0,), 1, 16, 512, 4, prefix_cache=False, warm=False, tight=False)


@pytest.fixture(scope="module")
def subject():
    return subject_for(tiny_decoder("qwen3"))


@pytest.fixture(scope="module")
def prompts(subject):
    return neighbours.victim_prompts(subject.sequences)


def test_trials_are_the_same_anywhere(subject, prompts):
    drawn = draw_trials(subject.decoder, prompts, seed=0)
    assert draw_trials(subject.decoder, prompts, seed=0, count=5) == drawn[:5]
    # A library that draws otherwise would make certificates of other machines incomparable.
    assert trials_digest(drawn) == "fc36cddcbaad686873ff29a2b1501e98301208408d75474ffb9dd3d58c8d2716"
    assert trials_digest(draw_trials(subject.decoder, prompts, seed=1)) != trials_digest(drawn)


def test_trials_cover_paths_kinds_pages_chunks_and_states(subject, prompts):
    drawn = draw_trials(subject.decoder, prompts, seed=0)
    assert {t.path for t in drawn} == set(neighbours.PATHS)
    assert {n.kind for t in drawn for n in t.neighbours} == set(neighbours.KINDS)
    assert len({t.page_size for t in drawn}) >= 4 and len({t.chunk for t in drawn}) >= 6
    assert {v for t in drawn for v in t.victims} == set(range(len(prompts)))
    for name in ("prefix_cache", "warm", "tight"):
        assert {getattr(t, name) for t in drawn} == {True, False}
    assert all(sum(len(n.ids) for n in t.neighbours) <= neighbours.NEIGHBOUR_TOKENS for t in drawn)


@pytest.mark.parametrize("path", ["rollout", "logits", "packs"])
def test_what_each_path_compares(subject, prompts, path):
    victim = alone(subject.decoder, prompts[0], 0)
    trial = dataclasses.replace(PLAIN, path=path, neighbours=(Neighbour("same", victim.prompt, 3),), places=(1, 0))
    tally = Tally()
    attempt(subject.decoder, [victim], trial, tally)
    vocabulary, drawn = subject.decoder.spec.vocab_size, neighbours.DRAWN
    numbers = {
        "rollout": 2 * drawn,
        "logits": 2 * drawn + drawn * vocabulary,
        "packs": (len(victim.ids) - 1) * vocabulary,
    }
    assert (tally.compared, tally.differing) == (numbers[path], 0)


def test_a_difference_is_found_and_made_small(subject, prompts):
    """Of three neighbours the one before the victim in its pack matters."""
    victim = alone(subject.decoder, prompts[0], 0)
    beside = tuple(Neighbour("random", tuple(range(i, i + 5)), 2) for i in range(3))
    trial = dataclasses.replace(PLAIN, path="packs", neighbours=beside, places=(1, 0, 2, 3))
    tally = Tally()
    with planted(fault("packing"), subject):
        search(subject.decoder, [victim], [trial], tally)
    assert tally.differing > 0
    assert tally.first.endswith("1 packs, beside random 5)")


def test_a_difference_that_needs_no_neighbour_is_said_to(subject, prompts):
    victim = alone(subject.decoder, prompts[0], 0)
    moved = dataclasses.replace(victim, sample=dataclasses.replace(victim.sample, logprobs=-victim.sample.logprobs))
    trial = dataclasses.replace(PLAIN, neighbours=(Neighbour("same", victim.prompt, 3),), places=(1, 0))
    tally = Tally()
    search(subject.decoder, [moved], [trial], tally)
    assert tally.differing == neighbours.DRAWN
    assert tally.first.endswith("beside nobody)")


def test_a_row_of_logits_that_no_pass_computed_is_found(subject, prompts):
    """Under an open tap, where passes run op by op; the nearest row is counted."""
    victim = alone(subject.decoder, prompts[0], 0)
    rows = [row.clone() for row in victim.drawn]
    rows[1][7] += 1.0
    tally = Tally()
    with tap.listen(lambda name, outputs, info: None):
        attempt(
            subject.decoder,
            [dataclasses.replace(victim, drawn=tuple(rows))],
            dataclasses.replace(PLAIN, path="logits"),
            tally,
        )
    assert tally.differing == 1
    assert "logits of token 1" in tally.first
