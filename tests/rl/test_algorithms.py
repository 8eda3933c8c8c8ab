"""Every named algorithm: computed by hand, against finite differences, at extremes, in any micro-batches."""

import dataclasses
import math

import numpy as np
import pytest

from tests.rl.rows import make_batch, make_sample, pick
from zerogap.config import ALGORITHMS, AlgorithmConfig
from zerogap.errors import ConfigError, NonFiniteError
from zerogap.moments import pool
from zerogap.rl.advantage import group_advantages, overlong_punishment, reward_kl, step_advantages, whitened
from zerogap.rl.loss import PolicyLoss
from zerogap.rl.metrics import flatten
from zerogap.types import TrainBatch

NAMES = tuple(ALGORITHMS)


def loss_of(name: str, max_length: int = 4, **settings: object) -> PolicyLoss:
    return PolicyLoss.from_config(AlgorithmConfig(name=name, **settings), max_length)


# ---------------------------------------------------------------------------------------------------- by hand

X = (-1.0, -0.5, -2.0)  # log-probs: two tokens of the first completion, one of the second
ROOT = math.sqrt(1.5)
# Ratios are 1.5 and 1 in the first completion, 0.5 in the second. `up`: advantages 1 and -1; `down`: -1 and 1.
# name -> (loss, derivatives, what both are divided by) of `up`, of `down`.
BY_HAND = {
    "grpo": (((-1.2 - 1) / 2 + 0.8, (0, -1 / 2, 0), 2), ((1.5 + 1) / 2 - 0.5, (1.5 / 2, 1 / 2, -0.5), 2)),
    "dr_grpo": ((-1.2 - 1 + 0.8, (0, -1, 0), 2 * 4), (1.5 + 1 - 0.5, (1.5, 1, -0.5), 2 * 4)),
    "dapo": ((-1.28 - 1 + 0.8, (0, -1, 0), 3), (1.5 + 1 - 0.5, (1.5, 1, -0.5), 3)),
    "gspo": ((-1.0004 + 0.9997, (0, 0, 0), 2), (ROOT - 0.5, (ROOT / 2, ROOT / 2, -0.5), 2)),
    "cispo": (
        (-1.5 * X[0] - X[1] + 0.5 * X[2], (-1.5, -1, 0.5), 3),
        (1.5 * X[0] + X[1] - 0.5 * X[2], (1.5, 1, -0.5), 3),
    ),
    "rloo": ((-1.2 - 1 + 0.8, (0, -1, 0), 2), (1.5 + 1 - 0.5, (1.5, 1, -0.5), 2)),
    "reinforce_pp": ((-1.2 - 1 + 0.8, (0, -1, 0), 3), (1.5 + 1 - 0.5, (1.5, 1, -0.5), 3)),
    "reinforce_pp_baseline": ((-1.2 - 1 + 0.8, (0, -1, 0), 3), (1.5 + 1 - 0.5, (1.5, 1, -0.5), 3)),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_losses_by_hand(name, sign):
    value, slopes, divisor = BY_HAND[name][0 if sign > 0 else 1]
    old = np.array(X) - np.log([1.5, 1.0, 0.5])
    batch = TrainBatch(
        samples=(make_sample(2), make_sample(1)),
        advantages=np.array([sign, -sign]),
        masks=(np.ones(2, bool), np.ones(1, bool)),
        old_logprobs=(old[:2].astype(np.float32), old[2:].astype(np.float32)),
    )
    rows = batch.rows((0, 1), np.array(X, np.float32), np.zeros(3, np.float32), version=0)
    loss = loss_of(name)
    result = loss(rows, loss.denominators(batch))
    # old log-probs are rounded to float32, which moves a ratio by at most 2^-23 of itself
    np.testing.assert_allclose(result.dlogp, np.array(slopes) / divisor, rtol=2**-22, atol=0)
    assert float(result.loss) == pytest.approx(value / divisor, abs=2**-20)


# Rewards of one group, by completion; lengths 1, 1 and 2, so that the batch has 4 tokens.
REWARDS = (1.0, 0.0, 0.5)
DEVIATION = math.sqrt(1 / 6 + 1e-8)  # of 1, 0, 0.5, 0.5
ADVANTAGES = {
    **dict.fromkeys(("grpo", "dapo", "gspo", "cispo"), (0.5 / 0.5001, -0.5 / 0.5001, 0.0)),
    "dr_grpo": (0.5, -0.5, 0.0),
    "rloo": (0.75, -0.75, 0.0),
    "reinforce_pp": (0.5 / DEVIATION, -0.5 / DEVIATION, 0.0),
    "reinforce_pp_baseline": (0.5 / DEVIATION, -0.5 / DEVIATION, 0.0),
}


@pytest.mark.parametrize("name", NAMES)
def test_advantages_by_hand(name):
    samples = [make_sample(n) for n in (1, 1, 2)]
    result = step_advantages(AlgorithmConfig(name=name), 100, samples, REWARDS, [0, 0, 0])
    np.testing.assert_allclose(result.values, ADVANTAGES[name], rtol=1e-14, atol=0)
    assert result.tokens is None
    assert flatten(result.metrics)["reward"] == 0.5


def test_the_kl_in_the_reward_by_hand():
    samples = [make_sample(n) for n in (1, 1, 2)]
    old = [np.float32([-1.0]), np.float32([-2.0]), np.float32([-1.0, -3.0])]
    ref = [np.float32([-1.5]), np.float32([-2.0]), np.float32([-2.0, -5.0])]  # log-ratios 0.5 | 0 | 1, 2
    given = {"samples": samples, "rewards": REWARDS, "groups": [0, 0, 0], "old": old, "reference": ref}

    def advantages(**settings):
        algorithm = AlgorithmConfig(beta=0.1, kl_in_reward=True, kl_estimator="k1", **settings)
        return step_advantages(algorithm, 100, **given)

    # rewards 1 - 0.05, 0, 0.5 - 0.3: each minus the mean of the other two
    rloo = advantages(baseline="leave_one_out", scale_rewards="none")
    np.testing.assert_allclose(rloo.values, (0.95 - 0.1, 0.0 - 0.575, 0.2 - 0.475), rtol=1e-14)
    assert rloo.tokens is None
    # without a baseline a token pays for itself and what follows
    plain = advantages(baseline="none", scale_rewards="none")
    np.testing.assert_allclose(np.concatenate(plain.tokens), (0.95, 0.0, 0.5 - 0.3, 0.5 - 0.2), rtol=1e-14)
    np.testing.assert_allclose(plain.values, (0.95, 0.0, 0.25), rtol=1e-14)
    white = advantages(baseline="none", scale_rewards="whiten")
    tokens = np.array([0.95, 0.0, 0.2, 0.3])
    expected = (tokens - tokens.mean()) / math.sqrt(tokens.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(np.concatenate(white.tokens), expected, rtol=1e-13)
    assert flatten(plain.metrics)["reward"] == flatten(rloo.metrics)["reward"] == 0.5  # the KL has its own metric


def test_a_kl_in_the_reward_is_not_in_the_loss():
    assert loss_of("rloo", beta=0.1).beta == 0.0
    assert loss_of("rloo", beta=0.1, kl_in_reward=False).beta == loss_of("grpo", beta=0.1).beta == 0.1


def test_a_kl_of_numbers_that_are_none_is_named():
    samples = [make_sample(2), make_sample(3)]
    zeros = [np.zeros(2, np.float32), np.zeros(3, np.float32)]
    for bad in (np.nan, np.inf):
        broken = [zeros[0], np.float32([0, 0, bad])]
        with pytest.raises(NonFiniteError, match="sample 1, completion position 2"):
            reward_kl(samples, zeros, broken, "k3", 0.1)
        with pytest.raises(NonFiniteError, match="sample 1, completion position 2"):
            reward_kl(samples, broken, zeros, "k3", 0.1)


def test_overlong_punishment_by_hand():
    assert overlong_punishment([0, 10, 12, 15, 20, 25], 20, 0.5).tolist() == [0.0, 0.0, -0.2, -0.5, -1.0, -1.0]
    assert overlong_punishment([20], 20, 0.0).tolist() == [0.0]
    samples = [make_sample(n) for n in (15, 5, 20)]
    algorithm = AlgorithmConfig(overlong_share=0.5, scale_rewards="none")
    result = step_advantages(algorithm, 20, samples, (1.0, None, 0.0), [0, 0, 0])
    assert result.values.tolist() == [0.75, 0.0, -0.75]  # rewards 0.5 and -1
    assert result.valid.tolist() == [True, False, True]


# ---------------------------------------------------------------------------------------------------- advantages


@pytest.mark.parametrize("baseline", ["group", "leave_one_out"])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, -7.7, 1e9 + 0.1])
@pytest.mark.parametrize("scale", ["none", "group", "whiten"])
def test_equal_rewards_have_advantages_of_exactly_zero(baseline, reward, scale):
    samples = [make_sample(n) for n in (3, 1, 7)]
    algorithm = AlgorithmConfig(baseline=baseline, scale_rewards=scale)
    assert (step_advantages(algorithm, 9, samples, [reward] * 3, [0] * 3).values == 0.0).all()


def test_a_reward_without_others_has_no_baseline_and_teaches_nothing():
    result = group_advantages([None, 2.0, None, 1.0, 3.0], [0, 0, 0, 1, 1], "none", "leave_one_out")
    assert result.values.tolist() == [0.0, 0.0, 0.0, -2.0, 2.0]
    with pytest.raises(ConfigError, match="a group of 1 has no baseline"):
        group_advantages([1.0], [0], "none", "leave_one_out")
    assert group_advantages([1.0], [0], "none", "none").values.tolist() == [1.0]
    with pytest.raises(ConfigError, match="group, leave_one_out, none"):
        group_advantages([1.0, 2.0], [0, 0], "none", "median")


def test_samples_that_a_filter_leaves_out_count_in_metrics_only():
    rewards, groups, kept = [1.0, 1.0, 0.0, 4.0], [0, 0, 1, 1], [False, False, True, True]
    batch = group_advantages(rewards, groups, "batch", kept=kept)
    alone = group_advantages(rewards[2:], groups[2:], "batch")
    assert batch.values.tolist() == [0.0, 0.0, *alone.values.tolist()]
    assert batch.valid.tolist() == kept
    flat = flatten(batch.metrics)
    assert (flat["reward"], flat["frac_reward_zero_std"]) == (1.5, 0.5)


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp_baseline"])
def test_whitening_counts_live_tokens_only(name):
    """A truncated completion that is masked, a missing reward and a group left out change nothing for the others."""
    few = [make_sample(n) for n in (2, 5, 1, 3)]
    more = [*few, make_sample(9, finish="length"), make_sample(8), make_sample(4), make_sample(6)]
    algorithm = AlgorithmConfig(name=name, mask_truncated_completions=True)
    alone = step_advantages(algorithm, 9, few, [1.0, 0.0, 2.0, -1.0], [0, 0, 1, 1])
    rewards = [1.0, 0.0, 2.0, -1.0, 0.5, None, 7.0, 9.0]
    kept = [True] * 6 + [False] * 2
    together = step_advantages(algorithm, 9, more, rewards, [0, 0, 1, 1, 2, 2, 3, 3], kept)
    assert together.values[:4].tolist() == alone.values.tolist()
    assert together.valid.tolist() == [True] * 5 + [False] * 3
    assert (together.values[5:] == 0.0).all()


def test_whitened_tokens_have_mean_zero_and_variance_one():
    rng = np.random.default_rng(3)
    samples = [make_sample(n) for n in (50, 3, 20, 1)]
    advantages = group_advantages(rng.standard_normal(4).tolist(), [0] * 4, "none")
    masks = [rng.random(len(s.completion_ids)) > 0.3 for s in samples]
    white = whitened(advantages, masks)
    tokens = np.concatenate([np.full(m.sum(), v) for v, m in zip(white.values, masks, strict=True)])
    assert abs(tokens.mean()) < 1e-15 and abs(tokens.var(ddof=1) - 1) < 1e-7


# ---------------------------------------------------------------------------------------------------- losses


def on_a_grid(values: np.ndarray) -> np.ndarray:
    """Rounded to multiples of 2^-12, which float32 holds exactly below 2^11, sums with 2^-9 included."""
    return (np.round(values.astype(np.float64) * 4096) / 4096).astype(np.float32)


@pytest.mark.parametrize("spread", [0.0001, 0.3])
@pytest.mark.parametrize("name", NAMES)
def test_derivative_equals_finite_differences(name, spread):
    """Central differences of the exact loss. What is not differentiated (cispo's weight) is held: old moves along."""
    loss = loss_of(name, 9, beta=0.1, kl_in_reward=False)
    batch, rows = make_batch((4, 1, 9), seed=4, spread=spread)
    columns = {c: on_a_grid(getattr(rows, c)) for c in ("logp", "old_logp", "ref_logp")}
    rows = dataclasses.replace(rows, **columns)
    denominators = loss.denominators(batch)
    result, step, compared = loss(rows, denominators), 2.0**-9, 0
    ratio = np.maximum(np.abs(rows.logp - rows.old_logp), np.abs(rows.logp - rows.ref_logp))
    for at in np.flatnonzero(rows.mask):
        ends = []
        for sign in (1, -1):
            moved = {"logp": rows.logp.copy()}
            if loss.surrogate == "cispo":
                moved["old_logp"] = rows.old_logp.copy()
            for column in moved.values():
                column[at] += np.float32(sign * step)
            ends.append(loss(dataclasses.replace(rows, **moved), denominators))
        if ends[0].metrics["clip_ratio/region"] != ends[1].metrics["clip_ratio/region"]:
            continue  # the range ends between the two
        compared += 1
        slope = float((ends[0].loss - ends[1].loss) / 2) / step
        # third derivatives are at most e^ratio (|A| + beta), weights at most 1: the error is step^2 / 6 times that
        size = (abs(rows.advantage[at]) + 0.1) * math.exp(ratio[at] + step)
        assert abs(result.dlogp[at] - slope) <= step**2 / 6 * size + 2**-24 * abs(slope) + 1e-12
    assert compared >= (5 if name == "gspo" else 9)


@pytest.mark.parametrize("gap", [200.0, -200.0, 1e30, -1e30])
@pytest.mark.parametrize("advantage", [3.0, -3.0])
@pytest.mark.parametrize("name", NAMES)
def test_extreme_log_ratios_stay_finite(name, gap, advantage):
    loss = loss_of(name)
    batch, rows = make_batch((4, 4))
    batch = dataclasses.replace(
        batch,
        advantages=np.full(2, advantage),
        masks=(np.ones(4, bool),) * 2,
        old_logprobs=(np.zeros(4, np.float32),) * 2,
        ref_logprobs=None,
    )
    result = loss(batch.rows((0, 1), np.full(8, gap, np.float32), rows.entropy, 0), loss.denominators(batch))
    assert np.isfinite(float(result.loss)) and np.isfinite(result.dlogp).all()
    assert all(np.isfinite(v) for v in flatten(result.metrics).values())


@pytest.mark.parametrize("lengths", [(1, 1000), (1, 5, 37, 3, 100, 1, 20)])
@pytest.mark.parametrize("name", NAMES)
def test_bits_do_not_depend_on_micro_batches_or_their_order(name, lengths):
    loss = loss_of(name, 1000, beta=0.1, kl_in_reward=False, entropy_coef=0.1)
    batch, rows = make_batch(lengths, seed=7)
    tokens = tuple(np.random.default_rng(n).standard_normal(n) for n in lengths)
    rows = dataclasses.replace(rows, advantage=np.concatenate(tokens))  # a token may have an advantage of its own
    denominators = loss.denominators(batch)
    whole = loss(rows, denominators)
    last = len(lengths) - 1
    for parts in ([[i] for i in range(last + 1)], [[*range(last)], [last]], [[last], [*range(last)][::-1]]):
        pieces = [
            (chosen, loss(pick(rows, np.concatenate([np.flatnonzero(rows.sample == i) for i in chosen])), denominators))
            for chosen in parts
        ]
        assert sum(p.loss for _, p in pieces) == whole.loss
        assert pool(p.metrics for _, p in pieces) == pool([whole.metrics])
        for chosen, piece in pieces:
            expected = np.concatenate([whole.dlogp[rows.sample == i] for i in chosen])
            assert (piece.dlogp.view(np.int32) == expected.view(np.int32)).all()


def test_a_sequence_ratio_does_not_depend_on_the_order_of_its_tokens():
    loss = loss_of("gspo")
    batch, rows = make_batch((700, 400), seed=7, ref=False)
    rng, count = np.random.default_rng(0), 1100
    # sums of about 4,000 with bits far below: every order rounds otherwise, and a ratio of e^7 shows it
    old, logp = (-(10.0 ** rng.uniform(*ends, count)).astype(np.float32) for ends in ((0.5, 1.1), (-12, -3)))
    rows = dataclasses.replace(rows, old_logp=old, logp=logp, advantage=-np.ones(count))
    denominators = loss.denominators(batch)
    whole = loss(rows, denominators)
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(len(rows.sample))
        mixed = loss(pick(rows, order), denominators)
        assert (mixed.loss, mixed.metrics) == (whole.loss, whole.metrics)
        assert (mixed.dlogp.view(np.int32) == whole.dlogp[order].view(np.int32)).all()


def test_a_sequence_ratio_needs_the_whole_sample():
    loss = loss_of("gspo")
    batch, rows = make_batch((5, 3), seed=1)
    first = int(np.flatnonzero(rows.mask)[0])
    with pytest.raises(AssertionError, match=r"samples \[0\] are split over micro-batches"):
        loss(pick(rows, np.arange(len(rows.sample)) > first), loss.denominators(batch))


def test_tokens_of_one_ratio_and_their_own_advantages():
    """GSPO-token: the ratio is the sequence's, the advantage the token's; masked tokens are in neither."""
    loss = loss_of("gspo", epsilon=0.5, epsilon_high=0.5)
    batch, rows = make_batch((6, 2), seed=1, spread=0.1)
    tokens = (np.arange(6.0), np.array([-1.0, 2.0]))
    batch = dataclasses.replace(batch, token_advantages=tokens)
    rows = batch.rows((0, 1), rows.logp, rows.entropy, 0)
    assert rows.advantage.tolist() == [*range(6), -1.0, 2.0]
    result = loss(rows, loss.denominators(batch))
    for sample in (0, 1):
        live = (rows.sample == sample) & rows.mask
        gap = rows.logp[live].astype(np.float64) - rows.old_logp[live]
        expected = -math.exp(gap.mean()) * rows.advantage[live] / (2 * live.sum())
        np.testing.assert_allclose(result.dlogp[live], expected, rtol=2**-23)


def test_cispo_keeps_every_gradient_and_counts_what_it_clips():
    batch, rows = make_batch((100, 100), seed=2, spread=1.0)
    rows = dataclasses.replace(rows, advantage=np.repeat([1.5, -0.5], 100))
    loss = PolicyLoss(epsilon=0.3, epsilon_high=1.5, surrogate="cispo")
    result = loss(rows, loss.denominators(batch))
    ratio = np.exp(rows.logp.astype(np.float64) - rows.old_logp)[rows.mask]
    assert (result.dlogp[rows.mask] != 0).all()
    flat = flatten(result.metrics)
    assert flat["clip_ratio/low_mean"] == (ratio < 0.7).mean() > 0.1
    assert flat["clip_ratio/high_mean"] == (ratio > 2.5).mean() > 0.05
    expected = -np.clip(ratio, 0.7, 2.5) * rows.advantage[rows.mask] / rows.mask.sum()
    np.testing.assert_allclose(result.dlogp[rows.mask], expected, rtol=2**-23)


@pytest.mark.parametrize(("name", "other"), [("gspo", {"name": "grpo"}), ("cispo", {}), ("rloo", {"name": "rloo"})])
def test_on_the_policy_that_drew_the_tokens_ratios_do_nothing(name, other):
    batch, rows = make_batch((50, 3, 7), seed=6)
    rows = dataclasses.replace(rows, logp=rows.rollout_logp, ref_logp=None)
    losses = loss_of(name), PolicyLoss.from_config(AlgorithmConfig(**other), 4)
    ours, theirs = (loss(rows, loss.denominators(batch)) for loss in losses)
    assert (ours.dlogp.view(np.int32) == theirs.dlogp.view(np.int32)).all()
    if name == "rloo":  # REINFORCE: every log-prob's derivative is the advantage, over the number of completions
        np.testing.assert_allclose(ours.dlogp, -rows.advantage * rows.mask / 3, rtol=2**-23)


def test_switches_are_checked():
    for wrong in ({"surrogate": "ppo"}, {"level": "word"}):
        with pytest.raises(ConfigError, match="choose"):
            PolicyLoss(**wrong)
