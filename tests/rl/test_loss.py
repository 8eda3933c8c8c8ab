"""The policy loss: derivative against torch autograd in float64, denominators, extremes, non-finite numbers."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from tests.rl.rows import make_batch, pick
from zerogap.config import AlgorithmConfig
from zerogap.errors import ConfigError, NonFiniteError
from zerogap.moments import pool
from zerogap.rl.loss import LOSS_TYPES, PolicyLoss
from zerogap.rl.metrics import flatten

LENGTHS = (1, 5, 37, 3, 100, 1, 20)


def bits(values):
    return values.view(np.int32)


def reference(loss, rows, lengths):
    """The global loss and its derivatives by log-prob and entropy, by torch autograd in float64."""
    logp = torch.tensor(rows.logp.astype(np.float64), requires_grad=True)
    entropy = torch.tensor(rows.entropy.astype(np.float64), requires_grad=True)
    old, advantage = torch.tensor(rows.old_logp.astype(np.float64)), torch.tensor(rows.advantage)
    mask = torch.tensor(rows.mask).double()
    ratio = (logp - old).clamp(-20, 20).exp()
    token = -torch.min(ratio * advantage, ratio.clamp(1 - loss.epsilon, 1 + loss.epsilon_high) * advantage)
    if rows.ref_logp is not None:
        d = (torch.tensor(rows.ref_logp.astype(np.float64)) - logp).clamp(-20, 20)
        token = token + loss.beta * {"k1": -d, "k2": d**2 / 2, "k3": d.exp() - d - 1}[loss.kl_estimator]
    token = (token - loss.entropy_coef * entropy) * mask
    sums, counts = [], []
    for part, part_mask in zip(token.split(list(lengths)), mask.split(list(lengths)), strict=True):
        sums.append(part.sum())
        counts.append(part_mask.sum())
    live = sum(1 for c in counts if c > 0)
    value = {
        "dapo": lambda: sum(sums) / sum(counts),
        "grpo": lambda: sum(s / c for s, c in zip(sums, counts, strict=True) if c > 0) / live,
        "dr_grpo": lambda: sum(sums) / (live * loss.max_completion_length),
        "sequence_sum": lambda: sum(sums) / live,
    }[loss.loss_type]()
    value.backward()
    grad = entropy.grad if entropy.grad is not None else torch.zeros_like(entropy)
    return value.item(), logp.grad.numpy(), grad.numpy()


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("kl", [(0.0, "k3"), (0.1, "k1"), (0.1, "k2"), (0.1, "k3")])
@pytest.mark.parametrize("spread", [0.02, 0.5, 30.0])
def test_derivative_equals_autograd(loss_type, kl, spread):
    loss = PolicyLoss(loss_type, 0.2, 0.28, *kl, entropy_coef=0.01, max_completion_length=128)
    batch, rows = make_batch(LENGTHS, seed=3, spread=spread)
    result = loss(rows, loss.denominators(batch))
    value, dlogp, dentropy = reference(loss, rows, LENGTHS)
    # one rounding to float32 (2^-24 relative) beside float64 noise
    np.testing.assert_allclose(result.dlogp, dlogp, rtol=1.01 * 2**-24, atol=1e-12)
    np.testing.assert_allclose(result.dentropy, dentropy, rtol=1.01 * 2**-24, atol=0)
    assert float(result.loss) == pytest.approx(value, rel=1e-11)
    if spread == 0.5:
        assert 0 < result.metrics["clip_ratio/low"].mean < 1 and 0 < result.metrics["clip_ratio/high"].mean < 1


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("lengths", [(1, 1000), LENGTHS])
def test_bits_do_not_depend_on_micro_batches(loss_type, lengths):
    loss = PolicyLoss(loss_type, beta=0.1, entropy_coef=0.1, max_completion_length=1000)
    batch, rows = make_batch(lengths, seed=7)
    assert rows.mask[0], "the single-token sample is live"
    denominators = loss.denominators(batch)
    whole = loss(rows, denominators)
    sizes = [[1] * len(lengths), [len(lengths) - 1, 1], [1, len(lengths) - 1]]
    for parts in sizes:
        edges = [0, *itertools.accumulate(parts)]
        pieces = [
            loss(pick(rows, (rows.sample >= a) & (rows.sample < b)), denominators) for a, b in itertools.pairwise(edges)
        ]
        assert sum(p.loss for p in pieces) == whole.loss
        assert (bits(np.concatenate([p.dlogp for p in pieces])) == bits(whole.dlogp)).all()
        assert (bits(np.concatenate([p.dentropy for p in pieces])) == bits(whole.dentropy)).all()
        assert pool(p.metrics for p in pieces) == pool([whole.metrics])
    # the control: a denominator of the micro-batch alone is another gradient
    alone = loss(pick(rows, rows.sample == 0), dataclasses.replace(denominators, tokens=1, sequences=1))
    assert (bits(alone.dlogp) != bits(whole.dlogp)[rows.sample == 0]).any()


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_masked_tokens_leave_numerator_and_denominator(loss_type):
    loss = PolicyLoss(loss_type, max_completion_length=64, beta=0.1)
    batch, rows = make_batch((5, 9, 7), seed=2)
    masks = (np.ones(5, bool), np.zeros(9, bool), np.ones(7, bool))
    with_masked = dataclasses.replace(batch, masks=masks)
    rows = with_masked.rows((0, 1, 2), rows.logp, rows.entropy, 0)
    keep = rows.sample != 1
    without = dataclasses.replace(
        batch,
        samples=(batch.samples[0], batch.samples[2]),
        advantages=batch.advantages[[0, 2]],
        masks=(masks[0], masks[2]),
        ref_logprobs=(batch.ref_logprobs[0], batch.ref_logprobs[2]),
    )
    small = without.rows((0, 1), rows.logp[keep], rows.entropy[keep], 0)
    a, b = loss(rows, loss.denominators(with_masked)), loss(small, loss.denominators(without))
    assert a.loss == b.loss
    assert (bits(a.dlogp[keep]) == bits(b.dlogp)).all()
    assert (bits(a.dlogp[~keep]) == 0).all()


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_all_truncated_is_loss_zero(loss_type, beta):
    loss = PolicyLoss(loss_type, beta=beta, max_completion_length=9)
    batch, rows = make_batch((5, 9))
    batch = dataclasses.replace(batch, masks=(np.zeros(5, bool), np.zeros(9, bool)))
    result = loss(batch.rows((0, 1), rows.logp, rows.entropy, 0), loss.denominators(batch))
    assert float(result.loss) == 0.0
    assert (bits(result.dlogp) == 0).all()
    assert all(np.isfinite(v) for v in flatten(result.metrics).values())


@pytest.mark.parametrize("gap", [200.0, -200.0, 1e30, -1e30])
@pytest.mark.parametrize("advantage", [3.0, -3.0])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_extreme_log_ratios_stay_finite(gap, advantage, estimator):
    loss = PolicyLoss(beta=0.1, kl_estimator=estimator)
    batch, rows = make_batch((4, 4))
    logp = np.full(8, gap, np.float32)
    batch = dataclasses.replace(
        batch,
        advantages=np.full(2, advantage),
        masks=(np.ones(4, bool),) * 2,
        old_logprobs=(np.zeros(4, np.float32),) * 2,
        ref_logprobs=(np.zeros(4, np.float32),) * 2,
    )
    result = loss(batch.rows((0, 1), logp, rows.entropy, 0), loss.denominators(batch))
    assert np.isfinite(float(result.loss)) and np.isfinite(result.dlogp).all()
    assert all(np.isfinite(v) for v in flatten(result.metrics).values())


COLUMNS = ["logp", "rollout_logp", "old_logp", "ref_logp", "entropy", "advantage"]


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_numbers(column, bad):
    loss = PolicyLoss(beta=0.1, entropy_coef=0.1)
    batch, rows = make_batch(LENGTHS, seed=5)
    denominators = loss.denominators(batch)
    clean = loss(rows, denominators)
    values = getattr(rows, column).copy()
    values[~rows.mask] = bad
    masked = loss(dataclasses.replace(rows, **{column: values}), denominators)
    assert masked.loss == clean.loss and (bits(masked.dlogp) == bits(clean.dlogp)).all()
    assert masked.metrics == clean.metrics
    at = int(np.flatnonzero(rows.mask & (rows.position == 7))[1])
    values = getattr(rows, column).copy()
    values[at] = bad
    with pytest.raises(NonFiniteError, match=f"sample {rows.sample[at]}, completion position 7"):
        loss(dataclasses.replace(rows, **{column: values}), denominators)


def test_overflow_to_float32_is_named():
    loss = PolicyLoss()
    batch, rows = make_batch((3, 3), ref=False)
    with pytest.raises(NonFiniteError, match="derivative of the loss"):
        loss(dataclasses.replace(rows, advantage=np.full(6, 1e60)), loss.denominators(batch))


def test_equal_log_probs_make_a_ratio_of_exactly_one():
    batch, rows = make_batch((50, 3), ref=False)
    rows = dataclasses.replace(rows, logp=rows.rollout_logp)
    loss = PolicyLoss(epsilon=0.0, epsilon_high=0.0)
    result = loss(rows, loss.denominators(batch))
    expected = np.where(rows.mask, -rows.advantage / rows.mask.sum(), 0.0)
    np.testing.assert_allclose(result.dlogp, expected, rtol=1.01 * 2**-24, atol=0)
    flat = flatten(result.metrics)
    assert flat["sampling/importance_sampling_ratio/min"] == flat["sampling/importance_sampling_ratio/max"] == 1.0
    assert flat["bit_wise/mismatched_tokens"] == 0.0 and flat["bit_wise/compared_tokens"] == rows.mask.sum()
    assert flat["clip_ratio/region_mean"] == 0.0


def test_reference_is_required_and_switches_are_checked():
    batch, rows = make_batch((3,), ref=False)
    loss = PolicyLoss(beta=0.1)
    with pytest.raises(ConfigError, match="reference log-probs"):
        loss(rows, loss.denominators(batch))
    for wrong in ({"loss_type": "x"}, {"kl_estimator": "k4"}, {"loss_type": "dr_grpo"}):
        with pytest.raises(ConfigError):
            PolicyLoss(**wrong)


def test_from_config():
    loss = PolicyLoss.from_config(AlgorithmConfig(epsilon=0.1, beta=0.2, loss_type="dr_grpo", kl_estimator="k2"), 77)
    assert loss == PolicyLoss("dr_grpo", 0.1, 0.1, 0.2, "k2", 0.0, 77)
    assert PolicyLoss.from_config(AlgorithmConfig(epsilon_high=0.28), 1).epsilon_high == 0.28


def test_old_log_probs_are_the_rollouts_unless_given():
    batch, rows = make_batch((4, 2))
    assert rows.old_logp is rows.rollout_logp
    other = dataclasses.replace(batch, old_logprobs=tuple(np.zeros(n, np.float32) for n in (4, 2)))
    assert (other.rows((0, 1), rows.logp, rows.entropy, 0).old_logp == 0).all()
