"""The parity ladder on every family and contract; every planted fault turns its own check red first."""

import pytest

from tests.tiny import FAMILIES, tiny_decoder
from zerogap.errors import ConfigError
from zerogap.ops.cpu import library
from zerogap.verify.checks import Subject
from zerogap.verify.faults import FAULTS, fault, planted
from zerogap.verify.ladder import LADDER, climb, subject_for

# What a dense model under bf16 cannot have, and words of the refusal.
REFUSED = {
    "stale-scales": "calibrated",
    "expert-capacity": "routed experts",
    "router-ties": "routed experts",
    "stale-experts": "routed experts",
    "raw-router-weights": "norm_topk_prob",
    "stale-router-bias": "correction bias",
    "latent-norm": "latent attention",
    "latent-rope": "latent attention",
}


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("numerics", ["bf16", "fp32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_check_is_exact(family, numerics, threads):
    with library.use_threads(threads):
        results = list(climb(subject_for(tiny_decoder(family, numerics))))
    assert [r.number for r in results] == list(LADDER)
    for result in results:
        assert result.exact, f"check {result.number}, {result.name}: {result.differing} differ; {result.first}"


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in FAULTS if n not in REFUSED])
def test_a_planted_fault_turns_its_own_check_red_first(name):
    """And what follows is only what the fault says contains it."""
    subject = subject_for(tiny_decoder("qwen3"))
    with planted(fault(name), subject) as faulty:
        red = [r.number for r in climb(faulty) if not r.exact]
    assert red, f"{name}: nothing turned red"
    assert red[0] == fault(name).check
    assert set(red[1:]) <= set(fault(name).follow)


def test_after_a_fault_the_subject_is_whole_again():
    subject = subject_for(tiny_decoder("llama"))
    with planted(fault("other-side"), subject) as faulty:
        assert not next(climb(faulty, [3])).exact
    assert next(climb(subject, [3])).exact


def test_an_unknown_fault_is_refused():
    with pytest.raises(ConfigError, match="batch-size"):
        fault("nothing")


@pytest.mark.parametrize("length", range(17, 33, 5))
def test_sequences_are_preempted_whatever_the_length_of_the_prompts(length):
    """Check 6 counts its own preemptions: a length at which there were none would look like a difference."""
    subject = Subject(tiny_decoder("llama"), [list(range(70)), list(range(3, 3 + length))])
    (result,) = climb(subject, [6])
    assert result.exact, result.first


@pytest.mark.parametrize("name", REFUSED)
def test_a_fault_that_model_or_contract_cannot_have_is_refused(name):
    with pytest.raises(ConfigError, match=REFUSED[name]), planted(fault(name), subject_for(tiny_decoder())):
        pass
