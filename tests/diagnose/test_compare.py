"""Numbers of the comparison, against plain loops; what counts as explained."""

import math

import numpy as np
import pytest
import torch

from tests.diagnose.sides import noisy, numbers, sequences, trace
from zerogap.diagnose.compare import difference, explains, statistics, unequal, worst_tokens


def test_statistics_are_those_of_a_plain_loop():
    a, b = trace(), trace(noisy(numbers(), 0.1))
    found = difference(a, b)
    d = [
        float(y) - float(x)
        for p, q in zip(a.recorded.logprobs, b.recorded.logprobs, strict=True)
        for x, y in zip(p, q, strict=True)
        if not math.isnan(x)
    ]
    numbers_ = statistics(found, a)
    assert numbers_["count"] == len(d) == 24 and numbers_["different"] == 24
    assert numbers_["mean"] == pytest.approx(np.mean(np.abs(d))) and numbers_["max"] == max(map(abs, d))
    assert numbers_["k3"] == pytest.approx(np.mean([math.exp(x) - 1 - x for x in d]))
    worst = worst_tokens(found, a)
    assert len(worst) == 20 and abs(worst[0]["d"]) == max(map(abs, d))
    place = worst[0]
    assert place["id"] == a.sequences[place["sequence"]].ids[place["position"]]
    assert sum(tokens for _, tokens in numbers_["histogram"]) == 24


def test_only_tokens_after_the_same_ids_are_compared():
    a = trace()
    of = list(sequences())
    ids = of[0].ids.copy()
    ids[6] += 1
    of[0] = type(of[0])(ids, of[0].prompt_length)
    found = difference(a, trace(of=tuple(of)))
    assert np.flatnonzero(~np.isnan(found.a[0])).tolist() == [4, 5]
    assert not found.differs.any()


def test_a_number_on_one_side_only_is_missing():
    values = [v.copy() for v in numbers()]
    values[1][-1] = np.nan
    found = difference(trace(), trace(values))
    assert found.num_missing == 1 and not found.same and not found.differs.any()


def test_what_is_explained_is_twenty_times_smaller_nearly_everywhere():
    a, b = trace(), trace(noisy(numbers(), 0.1))
    before = difference(a, b)
    exact = before.with_arrays(a=b.recorded.logprobs)
    assert explains(before, exact) and exact.same
    assert explains(before, before.with_arrays(a=noisy(b.recorded.logprobs, 0.001)))
    assert not explains(before, before.with_arrays(a=noisy(b.recorded.logprobs, 0.02)))
    assert not explains(difference(a, a), difference(a, a))


def test_unequal_elements():
    x = torch.tensor([[1.0, 0.0], [2.0, 3.0], [float("nan")] * 2, [float("nan"), 1.0]])
    y = torch.tensor([[1.0, -0.0], [2.0, 4.0], [1.0, 2.0], [float("nan"), 1.0]])
    assert unequal(x, y).tolist() == [[False, False], [False, True], [False, False], [False, False]]
    assert not unequal(x[:1], y[:1].bfloat16()).any()


def test_what_a_prefix_hit_left_out_is_not_missing():
    whole = numbers()
    behind = [np.where(np.arange(len(x)) < 7, np.float32(np.nan), x) for x in whole]
    hit = trace(behind, path="prefix_hit")
    assert difference(trace(whole), hit).same and difference(hit, trace(whole)).same
    assert difference(trace(whole), trace(behind)).num_missing > 0, "a whole pass has no such excuse"
    ended = [np.where(np.arange(len(x)) == len(x) - 1, np.float32(np.nan), x) for x in behind]
    assert difference(trace(whole), trace(ended, path="prefix_hit")).num_missing == len(whole), "the last tokens are"
