"""The trainer: gradients do not depend on the way through the batch, and the second step is as exact as the first."""

import dataclasses

import numpy as np
import pytest
import torch

from tests.bits import assert_same_bits
from tests.tiny import FAMILIES, tiny_decoder
from zerogap.errors import CheckpointError, ConfigError, ContractError, NonFiniteError, ParityError
from zerogap.ops.cpu import library
from zerogap.rl.loss import PolicyLoss
from zerogap.rollout.engine import Engine
from zerogap.train.checkpoint import list_checkpoints, load_checkpoint, save_checkpoint
from zerogap.train.optimizer import OptimizerSettings
from zerogap.train.trainer import Trainer
from zerogap.types import Sample, SamplingKey, SamplingParams, TrainBatch

LENGTHS = ((5, 9), (30, 40), (70, 3), (1, 64), (90, 50), (12, 1), (150, 80), (33, 33))


def make_trainer(family="llama", numerics="bf16", *, pack_tokens=128, grad_bins=1, **settings) -> Trainer:
    decoder = tiny_decoder(family, numerics, pack_tokens=pack_tokens, grad_bins=grad_bins)
    return Trainer(decoder, optimizer=OptimizerSettings(learning_rate=1e-2), **settings)


def make_batch(trainer: Trainer, params: SamplingParams | None = None, lengths=LENGTHS, seed: int = 0) -> TrainBatch:
    """Random ids, scored by the trainer itself, so that bits agree at its present weights."""
    generator = np.random.default_rng(seed)
    params = params or SamplingParams(temperature=0.7)
    samples = []
    for prompt, completion in lengths:
        ids = generator.integers(0, trainer.decoder.spec.vocab_size, prompt + completion).astype(np.int32)
        samples.append(
            Sample(
                prompt_ids=ids[:prompt],
                completion_ids=ids[prompt:],
                logprobs=np.zeros(completion, np.float32),
                versions=np.full(completion, trainer.decoder.version, np.int64),
                identity=trainer.decoder.identity,
                key=SamplingKey(),
                params=params,
                finish_reason="length",
            )
        )
    scored = trainer.logprobs(samples)
    samples = [dataclasses.replace(s, logprobs=logp) for s, logp in zip(samples, scored, strict=True)]
    advantages = generator.normal(size=len(samples))
    return TrainBatch(tuple(samples), advantages, tuple(np.ones(c, bool) for _, c in lengths))


def gradients(trainer: Trainer, batch: TrainBatch) -> dict[str, torch.Tensor]:
    result = trainer.forward_backward(batch, PolicyLoss(entropy_coef=0.01))
    assert (result.compared_tokens, result.mismatched_tokens) == (sum(c for _, c in LENGTHS), 0)
    taken, trainer._gradients = trainer._gradients, None
    return dict(zip(trainer.trainable, taken, strict=True))


def assert_same_gradients(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert list(ours) == list(theirs)
    for name in ours:
        assert_same_bits(ours[name], theirs[name], name)


@pytest.mark.parametrize("numerics", ["bf16", "fp32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_do_not_depend_on_micro_batches_threads_or_recompute(family, numerics):
    trainer = make_trainer(family, numerics, micro_batch_tokens=1)
    batch = make_batch(trainer)
    one_pack_each = gradients(trainer, batch)
    assert all(g.abs().sum() > 0 for g in one_pack_each.values())
    for tokens in (256, 512, 10**9):  # 2, 4 and all packs
        trainer.micro_batch_tokens = tokens
        assert_same_gradients(gradients(trainer, batch), one_pack_each)
    for threads in (1, 3):
        with library.use_threads(threads):
            assert_same_gradients(gradients(trainer, batch), one_pack_each)
    trainer.activation_recompute = True
    assert_same_gradients(gradients(trainer, batch), one_pack_each)


@pytest.mark.parametrize("bins", [1, 4])
def test_gradients_of_bins_do_not_depend_on_micro_batches(bins):
    trainer = make_trainer("qwen3", grad_bins=bins, micro_batch_tokens=1)
    batch = make_batch(trainer)
    first = gradients(trainer, batch)
    trainer.micro_batch_tokens = 10**9
    assert_same_gradients(gradients(trainer, batch), first)


def test_another_number_of_bins_is_another_order_of_summation():
    """The control: some bit of some gradient differs. What the sum over bins is, tests/train/test_bins.py says."""
    one, four = (make_trainer("qwen3", grad_bins=bins) for bins in (1, 4))
    a, b = gradients(one, make_batch(one)), gradients(four, make_batch(four))
    assert any(not torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("numerics", ["bf16", "fp32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_second_step_is_exact_and_repeats(family, numerics):
    """Two trainers with different micro-batches stay bit-equal over three updates, frozen tensors included."""
    first = make_trainer(family, numerics, micro_batch_tokens=1)
    second = make_trainer(family, numerics, micro_batch_tokens=10**9, activation_recompute=True)
    for step in range(3):
        batches = [make_batch(t, seed=step) for t in (first, second)]
        norms = []
        for trainer, batch in zip((first, second), batches, strict=True):
            result = trainer.forward_backward(batch, PolicyLoss())
            assert result.mismatched_tokens == 0 and result.compared_tokens > 0
            norms.append(trainer.optim_step().grad_norm)
        assert norms[0] == norms[1] > 0
        assert first.decoder.digests() == second.decoder.digests()
    assert first.decoder.version == 3


def test_only_trainable_tensors_change():
    trainer = make_trainer("qwen3", trainable=("last:1", "model.norm.weight"))
    before = trainer.decoder.digests()
    trainer.forward_backward(make_batch(trainer), PolicyLoss())
    trainer.optim_step()
    after = trainer.decoder.digests()
    changed = {name for name in before if before[name] != after[name]}
    assert changed == set(trainer.trainable)
    assert all(n == "model.norm.weight" or ".layers.1." in n for n in changed)


def test_a_flipped_bit_of_a_log_prob_aborts_before_any_update():
    trainer = make_trainer()
    batch = make_batch(trainer)
    wrong = batch.samples[3].logprobs.copy()
    wrong.view(np.int32)[7] ^= 1
    samples = list(batch.samples)
    samples[3] = dataclasses.replace(samples[3], logprobs=wrong)
    broken = dataclasses.replace(batch, samples=tuple(samples))
    before = trainer.decoder.digests()
    with pytest.raises(ParityError, match="sample 3, completion position 7"):
        trainer.forward_backward(broken, PolicyLoss())
    assert trainer.decoder.digests() == before
    trainer.on_mismatch = "warn"
    assert trainer.forward_backward(broken, PolicyLoss()).mismatched_tokens == 1
    trainer.optim_step()
    # The same samples are stale after the update: nothing is compared then, on purpose.
    assert trainer.forward_backward(batch, PolicyLoss()).compared_tokens == 0


def test_a_sample_of_another_identity_is_refused():
    trainer = make_trainer()
    batch = make_batch(trainer)
    foreign = dataclasses.replace(batch.samples[0], identity=dataclasses.replace(trainer.decoder.identity, build="x"))
    with pytest.raises(ContractError, match="sample 0"):
        trainer.forward_backward(dataclasses.replace(batch, samples=(foreign, *batch.samples[1:])), PolicyLoss())


def test_kept_sets_are_verified_then_reused_at_later_weights():
    """With filters, the second update of a batch scores every token over the set it was drawn from, so none is -inf."""
    trainer = make_trainer()
    params = SamplingParams(temperature=0.9, top_p=0.9, top_k=40)
    plain = make_batch(trainer, SamplingParams(temperature=0.9))
    engine = Engine.for_trainer(trainer)
    drawn = engine.generate([s.prompt_ids.tolist() for s in plain.samples], params, None)
    samples = tuple(drawn)
    masks = tuple(np.ones(len(s.completion_ids), bool) for s in samples)
    batch = TrainBatch(samples, plain.advantages, masks)
    result = trainer.forward_backward(batch, PolicyLoss())
    assert result.mismatched_tokens == 0 and result.compared_tokens == sum(len(m) for m in masks)
    trainer.optim_step()
    again = trainer.forward_backward(batch, PolicyLoss())
    assert np.isfinite(again.loss)
    broken = [dataclasses.replace(s, kept_counts=s.kept_counts + 1) for s in engine_again(trainer, plain, params)]
    trainer.on_mismatch = "warn"
    wrong = trainer.forward_backward(dataclasses.replace(batch, samples=tuple(broken)), PolicyLoss())
    assert wrong.mismatched_tokens == wrong.compared_tokens > 0


def engine_again(trainer: Trainer, batch: TrainBatch, params: SamplingParams) -> list[Sample]:
    engine = Engine.for_trainer(trainer)
    return engine.generate([s.prompt_ids.tolist() for s in batch.samples], params, None)


def test_a_gradient_that_is_not_finite_changes_nothing():
    trainer = make_trainer()
    trainer.forward_backward(make_batch(trainer), PolicyLoss())
    trainer._gradients[0][0] = float("nan")
    before = trainer.decoder.digests()
    with pytest.raises(NonFiniteError, match=trainer.trainable[0]):
        trainer.optim_step()
    assert trainer.decoder.digests() == before and trainer.optimizer.updates == 0


def test_a_checkpoint_continues_with_the_same_bits(tmp_path):
    straight = make_trainer("qwen3")
    for step in range(2):
        straight.forward_backward(make_batch(straight, seed=step), PolicyLoss())
        straight.optim_step()
        save_checkpoint(tmp_path, step + 1, straight, {"position": step}, keep=1)
    (path,) = list_checkpoints(tmp_path)
    assert path.name == "checkpoint-2"
    resumed = make_trainer("qwen3")
    assert load_checkpoint(path, resumed)["extra"] == {"position": 1}
    for trainer in (straight, resumed):
        trainer.forward_backward(make_batch(trainer, seed=9), PolicyLoss())
        trainer.optim_step()
    assert straight.decoder.digests() == resumed.decoder.digests()
    assert straight.decoder.version == resumed.decoder.version == 3


def test_the_first_log_probs_after_loading_are_those_before_saving(tmp_path):
    """Of fixed ids, in the trainer and in an engine that was there before, at the same weight version."""
    saved, loaded = make_trainer("llama"), make_trainer("llama")
    params = SamplingParams(temperature=0.7)
    engines = [Engine.for_trainer(t) for t in (saved, loaded)]
    for seed, trainer, engine in zip((0, 1), (saved, loaded), engines, strict=True):
        trainer.forward_backward(make_batch(trainer, seed=seed), PolicyLoss())
        trainer.optim_step()
        engine.update_weights(trainer)
    batch = make_batch(saved)
    prompt, completion = batch.samples[6].prompt_ids, batch.samples[6].completion_ids
    scores = [engine.score(prompt, completion, params) for engine in engines]
    assert scores[0].tolist() != scores[1].tolist()
    load_checkpoint(save_checkpoint(tmp_path, 1, saved, {}), loaded)
    for sample, logprobs in zip(batch.samples, loaded.logprobs(batch.samples), strict=True):
        assert_same_bits(logprobs, sample.logprobs, "trainer")
    with pytest.raises(ConfigError, match="call update_weights after load"):
        engines[1].score(prompt, completion, params)
    engines[1].update_weights(loaded)
    assert_same_bits(engines[1].score(prompt, completion, params), scores[0], "engine")


def test_checkpoints_of_another_model_or_contract_or_damaged_ones_are_refused(tmp_path):
    trainer = make_trainer()
    path = save_checkpoint(tmp_path, 10, trainer, {})
    assert [p.name for p in list_checkpoints(tmp_path)] == ["checkpoint-10"]
    with pytest.raises(ContractError, match="storage"):
        load_checkpoint(path, make_trainer(numerics="fp32"))
    other = make_trainer(trainable=("last:1",))
    with pytest.raises(CheckpointError, match="trains"):
        load_checkpoint(path, other)
    weights = path / "trainer.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="not a whole checkpoint"):
        load_checkpoint(path, make_trainer())


def test_an_update_without_a_gradient_is_refused():
    trainer = make_trainer(trainable="last:1")  # one pattern may stand without a list
    assert all(".layers.1." in name for name in trainer.trainable)
    with pytest.raises(ConfigError, match="forward_backward first"):
        trainer.optim_step()
