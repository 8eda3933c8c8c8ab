"""Metrics pool exactly, compare bits, and carry the names users know."""

import dataclasses
from fractions import Fraction

import numpy as np
import pytest

from tests.rl.rows import make_batch, make_sample
from zerogap.moments import Moments, exact_sum, pool
from zerogap.rl.correction import different_bits, exponential, mismatch_metrics
from zerogap.rl.data_rows import Row
from zerogap.rl.metrics import completion_metrics, flatten, reward_metrics, source_metrics
from zerogap.rl.reward import RewardScores


def test_exact_sum_against_fractions():
    rng = np.random.default_rng(0)
    values = rng.standard_normal(3000) * 10.0 ** rng.integers(-300, 290, 3000)
    values[:4] = [5e-324, -0.0, 1.7e308, -1.7e308]
    assert exact_sum(values) == sum(Fraction(v) for v in values)
    assert exact_sum(np.zeros(0)) == 0
    assert exact_sum(np.full(100_000, -0.1)) == 100_000 * Fraction(-0.1), "many of one exponent"


@pytest.mark.parametrize("parts", [(1, 999), (999, 1), (500, 500), (0, 1000)])
def test_unequal_parts_pool_to_the_whole(parts):
    values = np.random.default_rng(1).standard_normal(1000) ** 3
    pooled = pool([{"m": Moments.of(values[: parts[0]])}, {"m": Moments.of(values[parts[0] :])}])["m"]
    assert pooled == Moments.of(values)
    assert pooled.mean == float(sum(Fraction(v) for v in values) / 1000)
    mean_of_means = (np.mean(values[:1]) + np.mean(values[1:])) / 2
    assert pooled.mean != mean_of_means


def test_names_absent_in_some_parts():
    assert pool([{}, {"a": Moments.of(np.ones(2))}, {"b": Moments()}])["a"].count == 2


def test_bits_are_compared_as_integers():
    a = np.array([0.0, 1.0, np.nan, 1.0], np.float32)
    b = np.array([-0.0, 1.0, np.nan, np.nextafter(np.float32(1), np.float32(2))], np.float32)
    assert different_bits(a, b).tolist() == [True, False, False, True]
    with pytest.raises(AssertionError):
        different_bits(a, b.astype(np.float64))


def test_mismatch_metrics_see_one_bit_and_only_current_live_tokens():
    _, rows = make_batch((30, 40), ref=False)
    rows = dataclasses.replace(rows, logp=rows.rollout_logp.copy())
    at = int(np.flatnonzero(rows.mask)[5])
    rows.logp.view(np.int32)[at] ^= 1
    flat = flatten(mismatch_metrics(rows))
    assert flat["bit_wise/mismatched_tokens"] == 1.0
    assert flat["bit_wise/ratio_tokens_different/mean"] == 1 / rows.mask.sum()
    assert flat["bit_wise/logprob_diff/max"] == flat["sampling/sampling_logp_difference/max"] > 0
    stale = dataclasses.replace(rows, current=np.zeros(70, bool))
    assert flatten(mismatch_metrics(stale))["bit_wise/compared_tokens"] == 0
    only_masked = dataclasses.replace(rows, mask=rows.mask & (np.arange(70) != at))
    assert flatten(mismatch_metrics(only_masked))["bit_wise/mismatched_tokens"] == 0


def test_exponential_is_exact_at_zero_and_alone():
    values = np.random.default_rng(2).standard_normal(101)
    values[50] = 0.0
    together = exponential(values)
    assert together[50] == 1.0
    assert (together == np.array([exponential(values[i : i + 1])[0] for i in range(101)])).all()
    np.testing.assert_allclose(together, np.exp(values), rtol=1e-15)


def test_completion_and_reward_metrics():
    samples = [make_sample(3), make_sample(10, finish="length"), make_sample(5)]
    assert flatten(completion_metrics(samples)) == {
        "completions/mean_length": 6.0,
        "completions/min_length": 3.0,
        "completions/max_length": 10.0,
        "completions/mean_terminated_length": 4.0,
        "completions/clipped_ratio": 1 / 3,
    }
    columns = [[0.0, 1.0, None], [2.0, None, None], [None] * 3]
    scores = RewardScores([1.0, None, 4.0], columns, {}, {"own": 3.0}, errors=2, timeouts=3)
    assert reward_metrics(["f", "g", "h"], scores) == {
        "rewards/errors": 2.0, "rewards/timeouts": 3.0, "own": 3.0,
        "rewards/f/mean": 0.5, "rewards/f/std": 0.5**0.5, "rewards/g/mean": 2.0, "rewards/g/std": 0.0,
    }  # fmt: skip
    rows = [Row("", (), {}, source) for source in ("a/b", "c", "c")]
    assert source_metrics(rows, scores) == {"reward/a.b": 1.0, "reward/c": 4.0}
    assert source_metrics([rows[0]] * 3, scores) == {}, "no mixture"


def test_logged_names():
    batch, rows = make_batch((9, 9))
    from zerogap.rl.loss import PolicyLoss

    loss = PolicyLoss(beta=0.1)
    names = set(flatten(loss(rows, loss.denominators(batch)).metrics))
    assert names == {
        "entropy", "kl", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean",
        "sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max",
        "sampling/importance_sampling_ratio/min", "sampling/importance_sampling_ratio/mean",
        "sampling/importance_sampling_ratio/max", "bit_wise/logprob_diff/mean", "bit_wise/logprob_diff/max",
        "bit_wise/ratio_tokens_different/mean", "bit_wise/mismatched_tokens", "bit_wise/compared_tokens",
        "sampling/kl", "sampling/k3_kl", "sampling/chi2_token", "sampling/chi2_seq",
    }  # fmt: skip


@pytest.mark.parametrize("parts", [(1, 999), (999, 1), (500, 500)])
def test_lengths_of_unequal_ranks_are_logged_as_those_of_the_whole(parts):
    samples = [make_sample(1 + i % 37, "length" if i % 5 == 0 else "stop", seed=i) for i in range(1000)]
    ranks = (samples[: parts[0]], samples[parts[0] :])
    assert flatten(pool(map(completion_metrics, ranks))) == flatten(completion_metrics(samples))
