"""A corrected batch in the loss: weights scale the surrogate alone, and rejection is not the same as weight 0."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from tests.rl.rows import make_batch, pick
from zerogap.config import CorrectionConfig
from zerogap.errors import NonFiniteError
from zerogap.moments import pool
from zerogap.rl.correction import correct
from zerogap.rl.loss import LOSS_TYPES, PolicyLoss
from zerogap.rl.metrics import flatten

LENGTHS = (1, 5, 37, 3, 100, 1, 20)
SETTINGS = [
    CorrectionConfig(kind="token_tis"),
    CorrectionConfig(kind="token_mis", reject={"sequence_mean_k3": 0.2}, normalise=True),
    CorrectionConfig(kind="icepop", lower=0.8, upper=1.2),
]


def corrected(settings, lengths=LENGTHS, spread=0.5):
    """A corrected batch and its rows, at log-probs that have moved on since the correction."""
    batch, rows = make_batch(lengths, seed=3, spread=spread)
    rng = np.random.default_rng(4)
    old = tuple((s.logprobs + spread * rng.standard_normal(len(s.logprobs))).astype(np.float32) for s in batch.samples)
    batch, metrics = correct(dataclasses.replace(batch, old_logprobs=old), settings)
    return batch, batch.rows(range(len(lengths)), rows.logp, rows.entropy, version=0), metrics


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: s.kind)
def test_derivative_equals_autograd(loss_type, settings):
    loss = PolicyLoss(loss_type, 0.2, 0.28, 0.1, "k3", entropy_coef=0.01, max_completion_length=128)
    batch, rows, _ = corrected(settings)
    result = loss(rows, loss.denominators(batch))
    logp = torch.tensor(rows.logp.astype(np.float64), requires_grad=True)
    old, ref, advantage, weights, entropy = (
        torch.tensor(v.astype(np.float64))
        for v in (rows.old_logp, rows.ref_logp, rows.advantage, rows.weights, rows.entropy)
    )
    ratio = (logp - old).exp()
    surrogate = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
    d = ref - logp
    token = (weights * surrogate + 0.1 * (d.exp() - d - 1) - 0.01 * entropy) * torch.tensor(rows.mask)
    counts = torch.tensor([int(m.sum()) for m in batch.masks])
    sums = torch.stack([part.sum() for part in token.split(list(LENGTHS))])
    live = int((counts > 0).sum())
    value = {
        "dapo": sums.sum() / counts.sum(),
        "grpo": (sums[counts > 0] / counts[counts > 0]).sum() / live,
        "dr_grpo": sums.sum() / (live * 128),
        "sequence_sum": sums.sum() / live,
    }[loss_type]
    value.backward()
    np.testing.assert_allclose(result.dlogp, logp.grad.numpy(), rtol=1.01 * 2**-24, atol=1e-12)
    assert float(result.loss) == pytest.approx(value.item(), rel=1e-11)


def test_a_rejected_token_leaves_the_denominator_and_one_of_weight_0_does_not():
    """Three tokens of advantage 1 and ratio 1, one of them with rho = e^2: mean over two, or over three."""
    batch, rows = make_batch((3,), ref=False)
    rollout = np.full(3, -4.0, np.float32)
    old = np.array([-4.0, -4.0, -2.0], np.float32)
    sample = dataclasses.replace(batch.samples[0], logprobs=rollout)
    batch = dataclasses.replace(
        batch, samples=(sample,), advantages=np.ones(1), masks=(np.ones(3, bool),), old_logprobs=(old,)
    )
    loss = PolicyLoss()
    found = {}
    for kind in ("token_tis", "token_mis", "icepop"):
        fixed, _ = correct(batch, CorrectionConfig(kind=kind))
        denominators = loss.denominators(fixed)
        result = loss(fixed.rows([0], old, rows.entropy, version=0), denominators)
        found[kind] = (denominators.tokens, float(result.loss), result.dlogp.tolist())
    third = np.float32(1 / 3).item()
    assert found["token_tis"] == (3, -4 / 3, [-third, -third, np.float32(-2 / 3).item()])
    assert found["token_mis"] == (2, -1.0, [-0.5, -0.5, 0.0])
    kept = found["icepop"]
    assert (kept[0], kept[2]) == (3, [-third, -third, 0.0]) and kept[1] == pytest.approx(-2 / 3, rel=1e-15)


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: s.kind)
def test_bits_and_figures_do_not_depend_on_micro_batches(settings):
    loss = PolicyLoss("grpo", beta=0.1, entropy_coef=0.1)
    batch, rows, _ = corrected(settings)
    denominators = loss.denominators(batch)
    whole = loss(rows, denominators)
    for parts in ([1] * 7, [6, 1], [2, 5]):
        edges = [0, *itertools.accumulate(parts)]
        pieces = [
            loss(pick(rows, (rows.sample >= a) & (rows.sample < b)), denominators) for a, b in itertools.pairwise(edges)
        ]
        dlogp = np.concatenate([p.dlogp for p in pieces])
        assert (dlogp.view(np.int32) == whole.dlogp.view(np.int32)).all()
        assert sum(p.loss for p in pieces) == whole.loss
        assert pool(p.metrics for p in pieces) == whole.metrics


def test_weights_of_1_change_no_bit():
    loss = PolicyLoss(beta=0.1)
    batch, rows = make_batch(LENGTHS, seed=3)
    plain = loss(rows, loss.denominators(batch))
    ones = loss(dataclasses.replace(rows, weights=np.ones(len(rows.logp))), loss.denominators(batch))
    assert (ones.dlogp.view(np.int32) == plain.dlogp.view(np.int32)).all() and ones.loss == plain.loss


def test_a_weight_that_is_no_number_is_refused():
    loss = PolicyLoss()
    batch, rows, _ = corrected(SETTINGS[0])
    at = int(np.flatnonzero(rows.mask)[3])
    rows.weights[at] = np.nan
    with pytest.raises(NonFiniteError, match="importance weight is nan"):
        loss(rows, loss.denominators(batch))


def test_names_of_a_corrected_step():
    batch, rows, metrics = corrected(SETTINGS[0])
    loss = PolicyLoss()
    logged = flatten(pool([metrics, loss(rows, loss.denominators(batch)).metrics]))
    names = {n.removeprefix("sampling/") for n in logged if n.startswith("sampling/")}
    ratios = {f"{k}importance_sampling_ratio/{s}" for k in ("", "raw_") for s in ("min", "mean", "max")}
    assert names == ratios | {
        "sampling_logp_difference/mean", "sampling_logp_difference/max", "kl", "k3_kl", "chi2_token", "chi2_seq",
        "frac_modified_importance_sampling_ratio", "frac_rejected_tokens", "frac_rejected_sequences",
        "frac_vetoed_sequences", "effective_sample_size",
    }  # fmt: skip
