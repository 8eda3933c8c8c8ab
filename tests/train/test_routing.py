"""Routers under training: choices held against the rollout's, loads counted once, biases that follow them."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from tests.bits import assert_different_bits, assert_same_bits
from tests.tiny import tiny_decoder, tiny_spec
from tests.train.test_trainer import assert_same_gradients, make_batch
from zerogap.errors import CheckpointError, ConfigError, ParityError
from zerogap.models.moe_spec import MoESpec
from zerogap.numerics import preset
from zerogap.ops import backend, tap
from zerogap.ops.moe import Routing
from zerogap.rl.loss import PolicyLoss
from zerogap.rollout.engine import Engine
from zerogap.train.checkpoint import load_checkpoint, save_checkpoint
from zerogap.train.optimizer import OptimizerSettings
from zerogap.train.trainer import Trainer
from zerogap.types import SamplingParams, TrainBatch

BIASED = MoESpec(Routing(8, 3, "sigmoid", normalise=True, scaling=1.5), expert_size=64, has_bias=True)
PROMPTS = [list(range(5, 60)), [7, 8, 9]]


def make_trainer(biased=True, rate=0.01, **settings) -> Trainer:
    """A model whose routers have correction biases (or Qwen3's own router), and packs of 128 tokens."""
    spec = tiny_spec("qwen3_moe", moe=BIASED) if biased else tiny_spec("qwen3_moe")
    decoder = tiny_decoder(spec=spec, pack_tokens=128)
    chosen = OptimizerSettings(learning_rate=1e-2)
    return Trainer(decoder, optimizer=chosen, router_bias_rate=rate if biased else 0.0, **settings)


def roll_out(trainer: Trainer, engine: Engine | None = None, max_tokens: int = 12) -> TrainBatch:
    engine = engine or make_engine(trainer)
    samples = tuple(engine.generate(PROMPTS, SamplingParams(max_tokens=max_tokens, stop_token_ids=()), num_samples=3))
    advantages = np.linspace(-1.0, 1.0, len(samples))
    return TrainBatch(samples, advantages, tuple(np.ones(len(s.completion_ids), bool) for s in samples))


def make_engine(trainer: Trainer, **settings) -> Engine:
    return Engine.for_trainer(trainer, record_routing=True, kv_cache_bytes=1 << 20, max_sequences=8, **settings)


def with_trace(batch: TrainBatch, index: int, **arrays: np.ndarray) -> TrainBatch:
    samples = list(batch.samples)
    changed = dataclasses.replace(samples[index].routing, **arrays)
    samples[index] = dataclasses.replace(samples[index], routing=changed)
    return dataclasses.replace(batch, samples=tuple(samples))


def other_expert(batch: TrainBatch, index: int, token: int, layer: int) -> TrainBatch:
    """The trace as it would be had another expert been chosen once."""
    experts = batch.samples[index].routing.experts.copy()
    chosen = set(experts[token, layer].tolist())
    free = min(set(range(8)) - chosen)
    experts[token, layer] = sorted({*list(chosen)[1:], free})
    return with_trace(batch, index, experts=experts)


# ------------------------------------------------------------------------------------------------ evidence


@pytest.mark.parametrize("biased", [True, False])
def test_experts_agree_now_and_after_updates(biased):
    trainer = make_trainer(biased)
    engine = make_engine(trainer, max_batch_tokens=16)
    for step in range(3):
        batch = roll_out(trainer, engine)
        recorded = sum(int(s.routing.recorded.sum()) for s in batch.samples)
        assert recorded < sum(s.num_tokens - 1 for s in batch.samples), "prefix hits leave gaps"
        result = trainer.forward_backward(batch, PolicyLoss())
        assert (result.routing_compared, result.routing_mismatched) == (recorded, 0)
        assert result.mismatched_tokens == 0 < result.compared_tokens
        assert 0 < result.routing.margin == result.routing.metrics["moe/margin_min"]
        assert result.routing.metrics["moe/different_experts"] == 0
        trainer.optim_step()
        # Stale samples: nothing is compared at newer weights, whatever the routers choose there.
        again = trainer.forward_backward(batch, PolicyLoss())
        assert (again.routing_compared, again.compared_tokens) == (0, 0)
        assert "moe/different_experts" not in again.routing.metrics
        trainer._gradients = None
        engine.update_weights(trainer)
        assert trainer.decoder.version == step + 1


def test_preempted_and_rerun_sequences_are_compared_whole():
    trainer = make_trainer()
    page = trainer.decoder.codec().bytes_per_token() * 2 * 16
    small = Engine.for_trainer(
        trainer, record_routing=True, prefix_cache=False, kv_cache_bytes=12 * page, max_sequences=8
    )
    batch = roll_out(trainer, small, max_tokens=40)
    assert small.statistics.preemptions > 0
    result = trainer.forward_backward(batch, PolicyLoss())
    assert (result.routing_compared, result.routing_mismatched) == (sum(s.num_tokens - 1 for s in batch.samples), 0)


def test_another_expert_aborts_before_any_update_and_is_named():
    trainer = make_trainer()
    batch = roll_out(trainer)
    broken = other_expert(batch, 3, token=2, layer=1)
    before = trainer.decoder.digests()
    ours, theirs = (b.samples[3].routing for b in (batch, broken))
    words = f"sample 3, token 2, layer 1: trainer {ours.experts[2, 1].tolist()} with margin {ours.margins[2, 1]:.3g}, "
    with pytest.raises(ParityError) as error:
        trainer.forward_backward(broken, PolicyLoss())
    assert words + f"rollout {theirs.experts[2, 1].tolist()}" in str(error.value)
    assert trainer.decoder.digests() == before and trainer._gradients is None
    assert not trainer.routers._counts.any(), "loads of a batch that is not trained on do not count"
    trainer.on_mismatch = "warn"
    result = trainer.forward_backward(broken, PolicyLoss())
    assert (result.routing_mismatched, result.mismatched_tokens) == (1, 0)
    assert result.routing.metrics["moe/different_experts"] == 1 / result.routing_compared


def test_a_fault_in_the_trainers_router_is_seen_in_experts_first():
    """Logits of one layer are disturbed in the trainer alone: experts differ, and the error says so."""
    trainer = make_trainer(biased=False)
    batch = roll_out(trainer)
    router = trainer.decoder.weights["model.layers.1.mlp.gate.weight"]
    kept = router.value()
    router.load(kept.flip(0))
    with pytest.raises(ParityError, match=r"other experts than the rollout's: sample 0, token 0, layer 1"):
        trainer.forward_backward(batch, PolicyLoss())
    router.load(kept)
    assert trainer.forward_backward(batch, PolicyLoss()).routing_mismatched == 0


def test_one_sided_differences_are_counted_and_never_abort():
    """A rollout in FP8 beside BF16 training sends some tokens to other experts."""
    contract = preset("fp8-kv", pack_tokens=128)
    spec = tiny_spec("qwen3_moe")
    trained = tiny_decoder(spec=spec, pack_tokens=128)
    sampled = tiny_decoder(spec=spec, numerics="fp8-kv", pack_tokens=128)
    sampled.copy_from(trained)
    trainer = Trainer(trained, rollout_identity=backend.identity(contract))
    engine = Engine(sampled, record_routing=True, kv_cache_bytes=1 << 20, max_sequences=8)
    result = trainer.forward_backward(roll_out(trainer, engine), PolicyLoss())
    assert 0 < result.routing_mismatched < result.routing_compared
    share = result.routing.metrics["moe/different_experts"]
    assert share == result.routing_mismatched / result.routing_compared


def test_a_trace_of_another_shape_is_refused():
    trainer = make_trainer()
    batch = roll_out(trainer)
    trace = batch.samples[1].routing
    short = with_trace(batch, 1, experts=trace.experts[:-1], margins=trace.margins[:-1])
    with pytest.raises(ConfigError, match=r"samples\[1\]\.routing"):
        trainer.forward_backward(short, PolicyLoss())


# ------------------------------------------------------------------------------------------------ loads


def loads(trainer: Trainer, batch: TrainBatch) -> tuple[np.ndarray, dict[str, float]]:
    result = trainer.forward_backward(batch, PolicyLoss())
    counts = trainer.routers._counts.copy()
    trainer.routers.drop()
    trainer._gradients = None
    return counts, dict(result.routing.metrics) | {"loss": result.loss}


def test_loads_are_integers_of_the_batch_however_it_is_cut():
    trainer = make_trainer(balance_loss=0.1)
    batch = roll_out(trainer)
    trainer.micro_batch_tokens = 1
    counts, metrics = loads(trainer, batch)
    _, traces = trainer.logprobs_and_routing(batch.samples)
    expected = np.zeros((2, 8), np.int64)
    for layer in range(2):
        for trace in traces:
            expected[layer] += np.bincount(trace.experts[:, layer].ravel(), minlength=8)
    tokens = sum(s.num_tokens for s in batch.samples)
    assert (counts.sum(1) == 3 * tokens).all() and counts.dtype == np.int64
    assert ((counts - expected).sum(1) == 3 * len(batch.samples)).all(), "a trace lacks the last token, loads do not"
    assert metrics["moe/load_max"] == counts.max() * 8 / (3 * tokens)
    assert metrics["moe/idle_experts"] == (counts == 0).sum()
    for settings in ({"micro_batch_tokens": 10**9}, {"micro_batch_tokens": 256, "activation_recompute": True}):
        for name, value in settings.items():
            setattr(trainer, name, value)
        other, again = loads(trainer, batch)
        assert (other == counts).all() and again == metrics, settings


def test_margins_and_idle_experts():
    """A bias that no score outweighs: one expert is never chosen, another always."""
    trainer = make_trainer(rate=0.0)
    bias = trainer.decoder.weights["model.layers.1.mlp.gate.e_score_correction_bias"]
    changed = bias.value().clone()
    changed[2], changed[5] = -10.0, 10.0
    bias.load(changed)
    counts, metrics = loads(trainer, roll_out(trainer))
    assert counts[1, 2] == 0 and counts[1, 5] == counts[1].sum() // 3
    assert metrics["moe/idle_experts"] == 1 and metrics["moe/load_max"] == pytest.approx(8 / 3)
    assert 0 < metrics["moe/margin_min"] <= metrics["moe/margin_p01"] < 1


# ------------------------------------------------------------------------------------------------ balance loss


def taken_gradients(trainer: Trainer, batch: TrainBatch) -> dict[str, torch.Tensor]:
    trainer.forward_backward(batch, PolicyLoss())
    taken, trainer._gradients = trainer._gradients, None
    return dict(zip(trainer.trainable, taken, strict=True))


def test_the_balance_loss_reaches_routers_and_the_global_loss():
    plain, balanced = make_trainer(rate=0.0), make_trainer(rate=0.0, balance_loss=0.5)
    batch = roll_out(plain)
    without, with_it = plain.forward_backward(batch, PolicyLoss()), balanced.forward_backward(batch, PolicyLoss())
    mean = with_it.routing.metrics["moe/balance_loss"]
    assert mean == without.routing.metrics["moe/balance_loss"] > 1
    assert with_it.loss - without.loss == pytest.approx(0.5 * 2 * mean, rel=1e-12), "sum over two layers"
    assert without.mismatched_tokens == with_it.mismatched_tokens == 0
    plain._gradients = balanced._gradients = None
    a, b = taken_gradients(plain, batch), taken_gradients(balanced, batch)
    assert_different_bits(a["model.layers.1.mlp.gate.weight"], b["model.layers.1.mlp.gate.weight"], "router")
    assert_same_bits(a["lm_head.weight"], b["lm_head.weight"], "the head is above every router")


def test_its_gradients_do_not_depend_on_micro_batches_or_recompute():
    """Prompts without completions, alone in a micro-batch, are part of the batch's balance, too."""
    trainer = make_trainer(balance_loss=0.5, micro_batch_tokens=1)
    batch = make_batch(trainer, lengths=((70, 9), (100, 0), (30, 20), (60, 60)))
    first = taken_gradients(trainer, batch)
    loads_first = trainer.routers._counts.copy()
    assert loads_first.sum() == 2 * 3 * 349
    for tokens, recompute in ((10**9, False), (256, True)):
        trainer.routers.drop()
        trainer.micro_batch_tokens, trainer.activation_recompute = tokens, recompute
        assert_same_gradients(taken_gradients(trainer, batch), first)
        assert (trainer.routers._counts == loads_first).all()


def test_a_step_against_the_balance_gradient_lowers_it():
    """The derivative in the direction of the router's gradient, against the change of the logged figure."""
    spec = tiny_spec("qwen3_moe")
    figures = []
    for shift in (0.0, 1e-3):
        trainer = Trainer(tiny_decoder(spec=spec, numerics="fp32", pack_tokens=128), balance_loss=1.0)
        batch = make_batch(trainer, lengths=((90, 1), (40, 1)))
        silent = dataclasses.replace(batch, advantages=np.zeros(2))  # nothing but the balance loss
        gradient = taken_gradients(trainer, silent)["model.layers.1.mlp.gate.weight"]
        if shift:
            router = trainer.decoder.weights["model.layers.1.mlp.gate.weight"]
            router.load(router.value() - shift * gradient)
            silent = make_batch(trainer, lengths=((90, 1), (40, 1)))
        figures.append(trainer.forward_backward(silent, PolicyLoss()).routing.metrics["moe/balance_loss"])
    slope = float((gradient.double() ** 2).sum()) * 1e-3 / 2  # the figure is a mean over two layers
    # Choices are constants of the derivative; a flipped one moves the figure by more, hence the wide range.
    assert 0.5 * slope < figures[0] - figures[1] < 2 * slope


# ------------------------------------------------------------------------------------------------ correction biases


def biases(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.routers.state().items()}


def test_an_update_moves_biases_by_the_sign_of_their_loads():
    trainer = make_trainer(rate=0.01)
    engine = make_engine(trainer)
    batch = roll_out(trainer, engine)
    before, digests = biases(trainer), trainer.decoder.digests()
    addresses = [t.data_ptr() for t in trainer.routers.state().values()]
    trainer.forward_backward(batch, PolicyLoss())
    counts = trainer.routers._counts.copy()
    trainer.optim_step()
    after = biases(trainer)
    assert len(after) == 2
    for layer, (name, value) in enumerate(after.items()):
        mean = counts[layer].sum() / 8
        step = np.sign(mean - counts[layer]).astype(np.float32) * np.float32(0.01)
        assert_same_bits(value, before[name] + torch.from_numpy(step), name)
        assert trainer.decoder.digests()[name.removeprefix("buffer/")] != digests[name.removeprefix("buffer/")]
    assert addresses == [t.data_ptr() for t in trainer.routers.state().values()], "in place: the engine holds them"
    engine.update_weights(trainer)
    result = trainer.forward_backward(roll_out(trainer, engine), PolicyLoss())
    assert (result.mismatched_tokens, result.routing_mismatched) == (0, 0) and result.routing_compared > 0


def test_the_engine_feels_the_bias():
    """The control of the test above: at the old biases, the engine would have chosen other experts."""
    trainer = make_trainer(rate=0.3)
    engine = make_engine(trainer)
    trainer.forward_backward(roll_out(trainer, engine), PolicyLoss())
    old = biases(trainer)
    trainer.optim_step()
    engine.update_weights(trainer)
    batch = roll_out(trainer, engine)
    for name, tensor in trainer.routers.state().items():
        tensor.copy_(old[name])
    with pytest.raises(ParityError, match="a router chose other experts"):
        trainer.forward_backward(batch, PolicyLoss())


def test_several_backward_passes_make_one_update():
    """Gradient accumulation: counts of all parts move the biases once."""
    whole, parts = make_trainer(), make_trainer()
    batch = roll_out(whole)
    whole.forward_backward(batch, PolicyLoss())
    for half in (slice(0, 3), slice(3, 6)):
        part = TrainBatch(batch.samples[half], batch.advantages[half], batch.masks[half])
        parts.forward_backward(part, PolicyLoss())
    assert (whole.routers._counts == parts.routers._counts).all()
    whole.optim_step(), parts.optim_step()
    for name, value in biases(whole).items():
        assert_same_bits(value, biases(parts)[name], name)


def test_a_gradient_that_is_not_finite_moves_no_bias():
    trainer = make_trainer()
    before = biases(trainer)
    trainer.forward_backward(roll_out(trainer), PolicyLoss())
    trainer._gradients[0].fill_(math.nan)
    with pytest.raises(Exception, match="the gradient is not finite"):
        trainer.optim_step()
    assert not trainer.routers._counts.any()
    assert all(torch.equal(value, before[name]) for name, value in biases(trainer).items())


def test_a_resumed_run_has_equal_bits(tmp_path):
    first = make_trainer()
    engine = make_engine(first)
    batches = []

    def step(trainer, engine):
        batch = roll_out(trainer, engine)
        result = trainer.forward_backward(batch, PolicyLoss())
        trainer.optim_step()
        engine.update_weights(trainer)
        batches.append(batch)
        return result

    for _ in range(2):
        step(first, engine)
    path = save_checkpoint(tmp_path, 2, first, {})
    second = make_trainer()
    assert any((biases(first)[n] != biases(second)[n]).any() for n in biases(first))
    load_checkpoint(path, second)
    assert first.decoder.digests() == second.decoder.digests()
    results = [step(trainer, make_engine(trainer)) for trainer in (first, second)]
    assert results[0].routing.metrics == results[1].routing.metrics
    assert first.decoder.digests() == second.decoder.digests()
    without = make_trainer(biased=False)
    with pytest.raises(CheckpointError):
        load_checkpoint(path, without)


def test_a_checkpoint_with_another_bias_is_refused(tmp_path):
    """The planted fault: biases left out of what is restored."""
    first = make_trainer()
    first.forward_backward(roll_out(first), PolicyLoss())
    first.optim_step()
    path = save_checkpoint(tmp_path, 1, first, {})
    second = make_trainer()
    second.routers.load_state = lambda named: None
    with pytest.raises(CheckpointError, match="e_score_correction_bias has digest"):
        load_checkpoint(path, second)


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("llama", {"balance_loss": 0.1}, "moe.balance_loss = 0.1: this model has no routed experts"),
        ("llama", {"router_bias_rate": 0.1}, "moe.router_bias_rate = 0.1: this model has no routed experts"),
        ("qwen3_moe", {"router_bias_rate": 0.1}, "routers have no correction bias"),
        ("qwen3_moe", {"balance_loss": -1.0}, "moe.balance_loss = -1.0"),
    ],
)
def test_what_a_model_cannot_do_is_refused(family, settings, message):
    with pytest.raises(ConfigError, match=message):
        Trainer(tiny_decoder(family), **settings)


def test_the_trainer_leaves_no_tap_open():
    trainer = make_trainer()
    trainer.forward_backward(roll_out(trainer), PolicyLoss())
    assert not tap.is_open()
