"""The dictionary of metrics: every logged name is in it, once, and every entry is the name of something."""

import collections
import typing

import pytest

from zerogap.config import CorrectionConfig
from zerogap.rl.dictionary import ELSEWHERE, KINDS, PEERS, SECTIONS, Metric, find
from zerogap.rl.metrics import STATISTICS

ENTRIES = [metric for metrics in SECTIONS.values() for metric in metrics]


def test_names_are_unique_and_explained():
    counts = collections.Counter(metric.name for metric in ENTRIES)
    assert max(counts.values()) == 1
    assert all(len(metric.formula) > 4 and set(metric.peers) <= set(PEERS) for metric in ENTRIES)
    assert {peer for peer, _, _ in ELSEWHERE} <= set(PEERS)


@pytest.mark.parametrize("logged", [name for flat in STATISTICS.values() for name in flat])
def test_every_statistic_has_an_entry(logged):
    assert find(logged) is not None


def test_every_correction_is_told_in_other_words():
    assert set(KINDS) == set(typing.get_args(CorrectionConfig.model_fields["kind"].annotation)) - {"none"}
    assert all(verl for verl, _, _ in KINDS.values())


def test_look_up():
    assert find("rewards/number_match/mean").name == "rewards/{f}/mean"
    assert find("time/train").name == "time/train", "the plain entry comes before the one with a placeholder"
    assert find("time/save").name == "time/{phase}"
    assert find("eval/mean@4").name == "eval/mean@{n}"
    assert find("eval/accuracy").name == "eval/accuracy"
    assert find("sampling/k4_kl") is None and find("rewards/a/b/mean") is None
    assert not Metric("a.b", "").matches("axb"), "a point is a point"
