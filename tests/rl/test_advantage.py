"""Group advantages, and the batch built from them."""

import math
import statistics

import numpy as np
import pytest

from tests.rl.rows import make_sample
from zerogap.errors import ConfigError, NonFiniteError
from zerogap.rl.advantage import SCALE_EPS, build_batch, group_advantages, standard_deviation

REWARDS = [1.0, 0.0, 0.5, 0.0, 2.0, 2.5, -1.0, 7.0]
GROUPS = [0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_against_the_definition(scale):
    result = group_advantages(REWARDS, GROUPS, scale)
    for i, (reward, group) in enumerate(zip(REWARDS, GROUPS, strict=True)):
        members = [r for r, g in zip(REWARDS, GROUPS, strict=True) if g == group]
        spread = {"group": statistics.stdev(members), "batch": statistics.stdev(REWARDS), "none": 1 - SCALE_EPS}[scale]
        expected = (reward - statistics.fmean(members)) / (spread + SCALE_EPS)
        assert math.isclose(result.values[i], expected, rel_tol=1e-14), i
    assert result.valid.all()
    assert result.metrics["reward"].mean == statistics.fmean(REWARDS)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 0.0, -7.7, 1e-300, 1e9 + 0.1])
@pytest.mark.parametrize("size", [2, 3, 7, 8])
def test_equal_rewards_give_exactly_zero(scale, reward, size):
    result = group_advantages([reward] * size + [1.0, 2.0], [5] * size + [6, 6], scale)
    assert (result.values[:size] == 0.0).all()
    assert (result.values[size:] != 0.0).all()
    assert result.metrics["frac_reward_zero_std"].mean == 0.5


def test_none_is_left_out_and_zero_is_a_reward():
    result = group_advantages([None, 0.0, 1.0, None, None], [0, 0, 0, 1, 1], "none")
    assert result.values.tolist() == [0.0, -0.5, 0.5, 0.0, 0.0]
    assert result.valid.tolist() == [False, True, True, False, False]
    assert (result.metrics["reward"].count, result.metrics["reward"].mean) == (2, 0.5)
    assert result.metrics["reward_std"].count == 1


def test_group_of_one_is_refused():
    with pytest.raises(ConfigError, match="num_generations = 1: choose 2 or more"):
        group_advantages([1.0, 2.0, 3.0], [0, 0, 1], "group")


def test_bad_rewards_and_switches_are_refused():
    with pytest.raises(NonFiniteError, match="sample 1 is nan"):
        group_advantages([1.0, math.nan], [0, 0], "group")
    with pytest.raises(ConfigError, match="group, batch or none"):
        group_advantages([1.0, 2.0], [0, 0], "both")


def test_order_of_samples_changes_no_bit():
    rng = np.random.default_rng(0)
    rewards, groups = rng.standard_normal(64), rng.permutation(np.repeat(np.arange(8), 8))
    order = rng.permutation(64)
    for scale in ("group", "batch"):
        straight = group_advantages(rewards.tolist(), groups.tolist(), scale).values
        shuffled = group_advantages(rewards[order].tolist(), groups[order].tolist(), scale).values
        assert (straight[order].view(np.int64) == shuffled.view(np.int64)).all()


def test_standard_deviation_of_few():
    assert standard_deviation(np.array([])) == standard_deviation(np.array([3.0])) == 0.0


@pytest.mark.parametrize("mask_truncated", [False, True])
def test_masks(mask_truncated):
    samples = [make_sample(3), make_sample(2, finish="length"), make_sample(4), make_sample(1, finish="abort")]
    advantages = group_advantages([1.0, 0.0, None, 2.0], [0] * 4, "none")
    batch = build_batch(samples, advantages, mask_truncated)
    assert [m.tolist() for m in batch.masks] == [[True] * 3, [not mask_truncated] * 2, [False] * 4, [False]]
