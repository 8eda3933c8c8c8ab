"""The supervised loss: values, derivatives by finite differences, and a model that learns by it."""

import dataclasses

import numpy as np
import pytest

from tests.rl.rows import make_batch, pick
from tests.tiny import tiny_decoder
from zerogap.errors import NonFiniteError
from zerogap.rl.supervised import UNDRAWN, SupervisedLoss, supervised_batch
from zerogap.train.optimizer import OptimizerSettings
from zerogap.train.trainer import Trainer


def test_value_and_derivative():
    batch, rows = make_batch((5, 1, 9))
    loss = SupervisedLoss()
    denominators = loss.denominators(batch)
    assert denominators.tokens == rows.mask.sum()
    result = loss(rows, denominators)
    expected = -rows.logp[rows.mask].astype(np.float64).mean()
    assert float(result.loss) == pytest.approx(expected, rel=1e-12)
    assert float(result.metrics["nll"].mean) == pytest.approx(expected, rel=1e-12)
    assert result.dentropy is None and not result.dlogp[~rows.mask].any()
    step = 2.0**-6
    for at in np.flatnonzero(rows.mask)[:4]:
        moved = rows.logp.copy()
        moved[at] += np.float32(step)
        change = loss(dataclasses.replace(rows, logp=moved), denominators).loss - result.loss
        assert float(change) / float(moved[at] - rows.logp[at]) == pytest.approx(result.dlogp[at], rel=1e-6)


def test_micro_batches_add_up():
    batch, rows = make_batch((5, 1, 9))
    loss = SupervisedLoss()
    denominators, whole = loss.denominators(batch), loss(rows, loss.denominators(batch))
    parts = [loss(pick(rows, rows.sample == s), denominators) for s in range(3)]
    assert sum(part.loss for part in parts) == whole.loss
    assert np.array_equal(np.concatenate([part.dlogp for part in parts]), whole.dlogp)


def test_a_log_prob_that_is_none_is_named():
    batch, rows = make_batch((5, 1))
    at = int(np.flatnonzero(rows.mask)[1])
    logp = rows.logp.copy()
    logp[at] = np.inf
    with pytest.raises(NonFiniteError, match=f"sample {rows.sample[at]}, completion position {rows.position[at]}"):
        SupervisedLoss()(dataclasses.replace(rows, logp=logp), SupervisedLoss().denominators(batch))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_model_learns_its_answers(family):
    """Nothing was drawn, so nothing is compared; the loss falls by half."""
    trainer = Trainer(tiny_decoder(family), optimizer=OptimizerSettings(learning_rate=3e-3))
    pairs = [([7, 8, start], [start + 1, start + 2, 3]) for start in range(10, 18)]
    batch = supervised_batch(pairs, trainer.rollout_identity)
    assert all((s.versions == UNDRAWN).all() for s in batch.samples)
    results = []
    for _ in range(6):
        results.append(trainer.forward_backward(batch, SupervisedLoss()))
        trainer.optim_step()
    assert results[-1].loss < 0.5 * results[0].loss
    assert sum(r.compared_tokens for r in results) == 0
