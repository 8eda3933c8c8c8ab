"""From losses to weight gradients: independent of micro-batches, finite at extremes, no NaN let in or filtered out."""

import dataclasses

import numpy as np
import pytest
import torch

from tests.bits import assert_same_bits, count_differing_bits
from tests.train.test_trainer import assert_same_gradients, make_batch, make_trainer
from zerogap.errors import ConfigError, NonFiniteError, ParityError
from zerogap.rl.loss import LOSS_TYPES, PolicyLoss
from zerogap.train.trainer import BackwardResult, Trainer
from zerogap.types import TrainBatch

SHORT = ((5, 9), (30, 12), (2, 7))


def backward(trainer: Trainer, batch: TrainBatch, loss: PolicyLoss) -> tuple[BackwardResult, dict[str, torch.Tensor]]:
    """What the trainer says of the batch, and its gradient by name, which is taken away from the trainer."""
    result = trainer.forward_backward(batch, loss)
    taken, trainer._gradients = trainer._gradients, None
    return result, dict(zip(trainer.trainable, taken, strict=True))


def with_reference(batch: TrainBatch, distance: float = 0.3) -> TrainBatch:
    """The batch with old and reference log-probs around the rollout's."""
    rng = np.random.default_rng(4)

    def around() -> tuple[np.ndarray, ...]:
        return tuple((s.logprobs + distance * rng.standard_normal(len(s.logprobs))).astype(np.float32) for s in samples)

    samples = batch.samples
    return dataclasses.replace(batch, old_logprobs=around(), ref_logprobs=around())


LOSSES = {name: {"loss_type": name} for name in LOSS_TYPES} | {
    "cispo": {"surrogate": "cispo"},
    "gspo": {"loss_type": "grpo", "level": "sequence"},
}


@pytest.mark.parametrize("settings", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("bins", [1, 2])
def test_gradients_of_every_loss_do_not_depend_on_micro_batches(settings, bins):
    """Completions of 1 and of 1,000 tokens in one batch, some tokens masked."""
    trainer = make_trainer(pack_tokens=256, grad_bins=bins, micro_batch_tokens=1)
    lengths = ((3, 1), (5, 1000), (60, 90), (40, 1), (4, 30))
    batch = with_reference(make_batch(trainer, lengths=lengths))
    masks = [m.copy() for m in batch.masks]
    masks[1][::3], masks[4][:] = False, False
    batch = dataclasses.replace(batch, masks=tuple(masks))
    loss = PolicyLoss(beta=0.1, entropy_coef=0.01, max_completion_length=1000, **settings)
    first, gradients = backward(trainer, batch, loss)
    assert (first.compared_tokens, first.mismatched_tokens) == (1122, 0)
    assert all(g.abs().sum() > 0 for g in gradients.values())
    for tokens, recompute in ((300, False), (10**9, False), (10**9, True)):
        trainer.micro_batch_tokens, trainer.activation_recompute = tokens, recompute
        again, others = backward(trainer, batch, loss)
        assert_same_gradients(others, gradients)
        assert (again.loss, again.metrics) == (first.loss, first.metrics)
    _, control = backward(trainer, dataclasses.replace(batch, advantages=batch.advantages * 1.5), loss)
    name = trainer.trainable[0]
    assert count_differing_bits(control[name], gradients[name]) > 0, "the gradient depends on the loss at all"


@pytest.mark.parametrize("gap", [200.0, -200.0])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_extreme_log_ratios_give_finite_gradients_and_updates(gap, estimator):
    trainer = make_trainer()
    batch = make_batch(trainer, lengths=SHORT)
    far = tuple((s.logprobs - np.float32(gap)) for s in batch.samples)
    for sign in (1.0, -1.0):
        extreme = dataclasses.replace(batch, advantages=np.full(3, sign), old_logprobs=far, ref_logprobs=far)
        result, gradients = backward(trainer, extreme, PolicyLoss(beta=0.1, kl_estimator=estimator))
        assert np.isfinite(result.loss) and all(torch.isfinite(g).all() for g in gradients.values())
    trainer.forward_backward(extreme, PolicyLoss(beta=0.1, kl_estimator=estimator))
    assert np.isfinite(trainer.optim_step().grad_norm)
    assert all(torch.isfinite(h.value()).all() for h in trainer.handles)


def one_nan(values: tuple[np.ndarray, ...], sample: int, position: int) -> tuple[np.ndarray, ...]:
    changed = [v.copy() for v in values]
    changed[sample][position] = np.nan
    return tuple(changed)


def poison(batch: TrainBatch, column: str, sample: int = 1, position: int = 4) -> TrainBatch:
    """The batch with one NaN among its rollout, old or reference log-probs, or advantages."""
    if column == "advantages":
        return dataclasses.replace(batch, advantages=np.where(np.arange(3) == sample, np.nan, batch.advantages))
    if column != "logprobs":
        return dataclasses.replace(batch, **{column: one_nan(getattr(batch, column), sample, position)})
    logprobs = one_nan(tuple(s.logprobs for s in batch.samples), sample, position)
    samples = tuple(dataclasses.replace(s, logprobs=v) for s, v in zip(batch.samples, logprobs, strict=True))
    return dataclasses.replace(batch, samples=samples)


COLUMNS = ["logprobs", "old_logprobs", "ref_logprobs", "advantages"]


@pytest.mark.parametrize("column", COLUMNS)
def test_a_nan_at_a_masked_token_changes_no_bit(column):
    trainer = make_trainer(on_mismatch="warn")
    batch = with_reference(make_batch(trainer, lengths=SHORT))
    masks = (batch.masks[0], np.zeros(12, bool), batch.masks[2])
    if column != "advantages":  # which belong to a whole sample
        masks[1][:] = np.arange(12) != 4
    batch = dataclasses.replace(batch, masks=masks)
    loss = PolicyLoss(beta=0.1, entropy_coef=0.1)
    clean, gradients = backward(trainer, batch, loss)
    dirty, others = backward(trainer, poison(batch, column), loss)
    assert_same_gradients(others, gradients)
    assert (dirty.loss, dirty.metrics) == (clean.loss, clean.metrics)
    assert np.isfinite(dirty.loss) and all(torch.isfinite(g).all() for g in others.values())
    assert dirty.mismatched_tokens == (column == "logprobs"), "no number of the rollout escapes the comparison"


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("micro_batch_tokens", [1, 4096])
def test_a_nan_at_a_live_token_refuses_the_step_by_name(column, micro_batch_tokens):
    trainer = make_trainer(on_mismatch="warn", micro_batch_tokens=micro_batch_tokens)
    batch = with_reference(make_batch(trainer, lengths=SHORT))
    loss, before = PolicyLoss(beta=0.1), trainer.decoder.digests()
    _, gradients = backward(trainer, batch, loss)
    position = 0 if column == "advantages" else 4
    with pytest.raises(NonFiniteError, match=rf"is nan at sample 1, completion position {position}\b"):
        trainer.forward_backward(poison(batch, column), loss)
    with pytest.raises(ConfigError, match="forward_backward first"):
        trainer.optim_step()
    assert trainer.decoder.digests() == before
    assert_same_gradients(backward(trainer, batch, loss)[1], gradients)
    if column == "logprobs":
        trainer.on_mismatch = "abort"
        with pytest.raises(ParityError, match=r"sample 1, completion position 4: trainer .*rollout np\.float32.nan"):
            trainer.forward_backward(poison(batch, column), loss)


def test_a_nan_from_the_trainers_own_forward_is_named_and_refused():
    trainer = make_trainer()
    batch = make_batch(trainer, lengths=SHORT)
    trainer.forward_backward(batch, PolicyLoss())
    trainer.optim_step()  # so that no token is compared any more
    norm = trainer.decoder.weights["model.norm.weight"]
    norm.load(torch.full(norm.spec.shape, float("inf")))
    with pytest.raises(NonFiniteError, match="trainer log-prob is nan at sample 0, completion position 0"):
        trainer.forward_backward(batch, PolicyLoss())


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_masked_sample_leaves_numerator_and_denominator(loss_type):
    """The gradient is that of the batch without the sample. Every sample fills a pack, so sums are the same ones."""
    trainer = make_trainer()
    batch = make_batch(trainer, lengths=((100, 12), (90, 9), (110, 17)))
    loss = PolicyLoss(loss_type, max_completion_length=20)
    masked = dataclasses.replace(batch, masks=(batch.masks[0], np.zeros(9, bool), batch.masks[2]))
    alone = TrainBatch((batch.samples[0], batch.samples[2]), batch.advantages[[0, 2]], (batch.masks[0], batch.masks[2]))
    with_masked, gradients = backward(trainer, masked, loss)
    without, others = backward(trainer, alone, loss)
    assert with_masked.loss == without.loss
    for name in gradients:
        assert_same_bits(gradients[name] + 0.0, others[name] + 0.0, name)  # a sum with +0 makes -0 to +0
    everything = dataclasses.replace(batch, masks=tuple(np.zeros_like(m) for m in batch.masks))
    nothing, zeros = backward(trainer, everything, loss)
    assert nothing.loss == 0.0 and not any(g.any() for g in zeros.values())


def test_a_forward_that_is_nan_in_a_masked_sample_only_is_refused_at_the_update():
    """Weights or activations are broken then; nothing of it is averaged away or published."""
    trainer = make_trainer("qwen3")
    batch = make_batch(trainer, lengths=SHORT)
    batch = dataclasses.replace(batch, masks=(batch.masks[0], np.zeros(12, bool), batch.masks[2]))
    trainer.decoder.version += 1  # so that no token is compared
    token = int(batch.samples[1].prompt_ids[0])
    assert all(token not in [*s.prompt_ids, *s.completion_ids] for s in (batch.samples[0], batch.samples[2]))
    rows = trainer.decoder.embed.value().float()
    rows[token] = np.nan
    trainer.decoder.embed.load(rows)
    before = trainer.decoder.digests()
    assert np.isfinite(trainer.forward_backward(batch, PolicyLoss()).loss)
    with pytest.raises(NonFiniteError, match=r"the gradient is not finite in lm_head\.weight; weights are unchanged"):
        trainer.optim_step()
    assert trainer.decoder.digests() == before
