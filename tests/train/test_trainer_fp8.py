"""The trainer in FP8: gradients, calibrated scale sets, and a rollout that is declared to differ."""

import dataclasses

import numpy as np
import pytest
import torch

from tests.tiny import tiny_decoder
from tests.train.test_trainer import assert_same_gradients, gradients, make_batch
from zerogap.errors import CheckpointError, ConfigError, ContractError, NonFiniteError
from zerogap.models.decoder import Decoder
from zerogap.numerics import preset
from zerogap.ops.backend import identity
from zerogap.ops.cpu import library
from zerogap.ops.kv_scales import KVScales
from zerogap.rl.loss import PolicyLoss
from zerogap.rollout.engine import Engine
from zerogap.train.checkpoint import load_checkpoint, save_checkpoint
from zerogap.train.optimizer import OptimizerSettings
from zerogap.train.trainer import Trainer
from zerogap.types import SamplingParams, TrainBatch

CALIBRATED = {"numerics": "fp8-kv", "kv_scale": "calibrated"}
CONTRACTS = {
    "fp8": {"numerics": "fp8"},
    "fp8 pow2, bf16 backward": {"numerics": "fp8", "scale_format": "pow2", "linear_grad": "bf16"},
    "fp8-kv": {"numerics": "fp8-kv", "attention_math": "fp8"},
    "calibrated": {**CALIBRATED, "kv_margin": 1.0},
}
PROMPTS = [list(range(3, 40)), [7, 7, 9]]


def make_trainer(contract: dict, family: str = "llama", **settings) -> Trainer:
    decoder = tiny_decoder(family, pack_tokens=128, **contract)
    if decoder.calibrated:
        decoder.calibrate(PROMPTS)
    return Trainer(decoder, optimizer=OptimizerSettings(learning_rate=1e-2), **settings)


def drawn(trainer: Trainer, engine: Engine, seed: int = 0) -> TrainBatch:
    """A batch that the engine drew."""
    params = SamplingParams(max_tokens=8, stop_token_ids=())
    samples = tuple(engine.generate(PROMPTS, params, num_samples=2))
    masks = tuple(np.ones(len(s.completion_ids), bool) for s in samples)
    return TrainBatch(samples, np.random.default_rng(seed).normal(size=len(samples)), masks)


def with_scales(trainer: Trainer, batch: TrainBatch) -> TrainBatch:
    """The samples as drawn with the trainer's present scale set."""
    scales = trainer.decoder.kv_scales
    name = None if scales is None else scales.name
    return dataclasses.replace(batch, samples=tuple(dataclasses.replace(s, scale_set=name) for s in batch.samples))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("name", CONTRACTS)
def test_gradients_do_not_depend_on_micro_batches_threads_or_recompute(name, family):
    trainer = make_trainer(CONTRACTS[name], family, micro_batch_tokens=1)
    batch = with_scales(trainer, make_batch(trainer))
    one_pack_each = gradients(trainer, batch)
    assert all(g.abs().sum() > 0 for g in one_pack_each.values())
    for tokens in (256, 10**9):
        trainer.micro_batch_tokens = tokens
        assert_same_gradients(gradients(trainer, batch), one_pack_each)
    with library.use_threads(3):
        assert_same_gradients(gradients(trainer, batch), one_pack_each)
    trainer.activation_recompute = True
    assert_same_gradients(gradients(trainer, batch), one_pack_each)


def test_contracts_have_gradients_of_their_own():
    """The control: another contract, another gradient."""
    seen = []
    for contract in ({"numerics": "bf16"}, *CONTRACTS.values()):
        trainer = make_trainer(contract)
        seen.append(gradients(trainer, with_scales(trainer, make_batch(trainer))))
    name = "model.layers.0.mlp.up_proj.weight"
    assert len({g[name].numpy().tobytes() for g in seen}) == len(seen)


def test_every_version_has_scales_of_its_own_from_the_forward_before_it():
    trainer = make_trainer(CALIBRATED)
    engine = Engine.for_trainer(trainer)
    names = [trainer.decoder.kv_scales.name]
    for step in range(4):
        batch = drawn(trainer, engine, step)
        assert {s.scale_set for s in batch.samples} == {names[-1]}
        result = trainer.forward_backward(batch, PolicyLoss())
        assert result.mismatched_tokens == 0 < result.compared_tokens
        trainer.optim_step()
        names.append(trainer.decoder.kv_scales.name)
        with pytest.raises(ConfigError, match="call update_weights"):
            engine.step()
        engine.update_weights(trainer)
    assert len(set(names)) == 5 and trainer.decoder.version == 4
    assert trainer.calibration_seconds > 0


def test_calibration_does_not_depend_on_how_the_batch_is_cut():
    scales = []
    for tokens in (1, 10**9):
        trainer = make_trainer(CALIBRATED, micro_batch_tokens=tokens)
        trainer.forward_backward(with_scales(trainer, make_batch(trainer)), PolicyLoss())
        trainer.optim_step()
        scales.append(trainer.decoder.kv_scales.values)
    assert torch.equal(*scales)


def test_every_update_on_a_batch_uses_the_scales_it_was_drawn_with():
    trainer = make_trainer(CALIBRATED)
    batch = drawn(trainer, Engine.for_trainer(trainer))
    seen: list[torch.Tensor] = []
    whole = trainer.decoder.scratch_kv

    def spy(pages, scales=None, calibration=None):
        seen.append(scales.values)
        return whole(pages, scales, calibration)

    trainer.decoder.scratch_kv = spy
    first = trainer.decoder.kv_scales.values
    for _ in range(3):
        trainer.forward_backward(batch, PolicyLoss())
        trainer.optim_step()
    assert all(torch.equal(used, first) for used in seen) and len(seen) == 3
    assert not torch.equal(trainer.decoder.kv_scales.values, first)


def test_an_update_that_leaves_no_number_names_learning_rate_and_tensor():
    trainer = make_trainer({"numerics": "fp8"})
    trainer.forward_backward(make_batch(trainer), PolicyLoss())
    with pytest.raises(NonFiniteError, match=r"update 1 at learning rate 1e\+38: model\.layers.*lower optimizer"):
        trainer.optim_step(1e38)


# ---- a missing or foreign set


def test_without_scales_nothing_is_computed():
    decoder = tiny_decoder("llama", **CALIBRATED)
    trainer = Trainer(decoder)
    engine = Engine(decoder)
    with pytest.raises(ContractError, match="none are known"):
        engine.score([1, 2], [3], SamplingParams())
    with pytest.raises(ContractError, match="none are known"):
        trainer.logprobs(make_samples(decoder))


def make_samples(decoder: Decoder):
    from zerogap.verify.paths import as_sample

    return [as_sample(decoder, [1, 2, 3])]


def test_scales_missing_for_one_layer_are_refused():
    decoder = tiny_decoder("llama", **CALIBRATED)
    scales = decoder.calibrate(PROMPTS)
    with pytest.raises(ConfigError, match="kv_scales"):
        decoder.set_kv_scales(KVScales(scales.values[:1]))
    numbers = scales.to_list()
    numbers[1][0][0] = None
    with pytest.raises(CheckpointError):
        KVScales.from_list(numbers)
    numbers[1][0][0] = 0.0
    with pytest.raises(CheckpointError, match="positive"):
        KVScales.from_list(numbers)
    layers = decoder.new_kv(1, 16)
    with pytest.raises(ContractError, match="no scales"):
        run_layer(decoder, dataclasses.replace(layers[0], key_scales=None))


def run_layer(decoder: Decoder, kv) -> None:
    from zerogap.ops.attention import attention
    from zerogap.train.packing import Pack, build_micro_batch
    from zerogap.verify.paths import as_sample

    spec = decoder.spec
    micro = build_micro_batch([Pack((0,), 3)], [as_sample(decoder, [1, 2, 3])])
    rows = [torch.zeros(3, heads * spec.head_dim, dtype=torch.bfloat16) for heads in (spec.num_heads, 2, 2)]
    context = dataclasses.replace(micro.context, page_size=16)
    attention(*rows, kv, context, num_heads=6, num_kv_heads=2, head_dim=32, scale=0.1, kv_split=1024, leaves=1)


def test_a_batch_of_another_weight_versions_scales_is_refused():
    trainer = make_trainer(CALIBRATED)
    engine = Engine.for_trainer(trainer)
    old = drawn(trainer, engine)
    for _ in range(2):
        trainer.forward_backward(drawn(trainer, engine), PolicyLoss())
        trainer.optim_step()
        engine.update_weights(trainer)
    with pytest.raises(ContractError, match=f"scale set {old.samples[0].scale_set}"):
        trainer.forward_backward(old, PolicyLoss())
    mixed = dataclasses.replace(old, samples=(*old.samples[:2], *drawn(trainer, engine).samples[2:]))
    with pytest.raises(ContractError, match="2 KV scale sets"):
        trainer.forward_backward(mixed, PolicyLoss())


def test_loading_other_weights_forgets_the_scales():
    decoder = tiny_decoder("llama", **CALIBRATED)
    decoder.calibrate(PROMPTS)
    engine = Engine(decoder)
    decoder.load((name, handle.value()) for name, handle in decoder.weights.items())
    assert decoder.needs_calibration and "kv_scales" not in decoder.digests()
    with pytest.raises(ConfigError, match="call update_weights after load"):
        engine.step()
    engine.update_weights(decoder)
    with pytest.raises(ContractError, match="none are known"):
        engine.step()


def test_keys_that_are_not_finite_are_named():
    amax = torch.ones(2, 2, 2)
    amax[1, 1, 0] = float("inf")
    with pytest.raises(NonFiniteError, match="values of layer 1, KV head 0"):
        KVScales.of(amax, preset("fp8-kv", kv_scale="calibrated"))


@pytest.mark.parametrize("scale_format", ["fp32", "pow2"])
def test_scales_are_margin_times_amax_over_448(scale_format):
    generator = torch.Generator().manual_seed(0)
    amax = torch.rand(3, 2, 4, generator=generator) * 100
    amax[0, 0, 0], amax[1, 1, 1], amax[2, 0, 0] = 0.0, 2.0**-101, 448.0
    contract = preset("fp8-kv", kv_scale="calibrated", scale_format=scale_format, kv_margin=1.5)
    scales = KVScales.of(amax, contract).values.numpy()
    expected = (amax.numpy() * np.float32(1.5)) / np.float32(448)
    if scale_format == "pow2":
        exponents = np.log2(expected.astype(np.float64), where=expected > 0, out=np.zeros(expected.shape))
        expected = np.exp2(np.ceil(exponents))
    expected[0, 0, 0] = expected[1, 1, 1] = 1.0
    np.testing.assert_array_equal(scales, expected.astype(np.float32))
    assert KVScales.from_list(KVScales(torch.from_numpy(scales)).to_list()).values.numpy().tobytes() == scales.tobytes()


# ---- checkpoints


def test_a_checkpoint_carries_the_scales(tmp_path):
    straight = make_trainer(CALIBRATED, "qwen3")
    straight.forward_backward(with_scales(straight, make_batch(straight)), PolicyLoss())
    straight.optim_step()
    path = save_checkpoint(tmp_path, 1, straight, {})
    resumed = make_trainer(CALIBRATED, "qwen3")
    load_checkpoint(path, resumed)
    assert resumed.decoder.kv_scales.name == straight.decoder.kv_scales.name
    for trainer in (straight, resumed):
        trainer.forward_backward(with_scales(trainer, make_batch(trainer, seed=9)), PolicyLoss())
        trainer.optim_step()
    assert straight.decoder.digests() == resumed.decoder.digests()
    state = path / "state.json"
    state.write_text(state.read_text().replace('"kv_scales"', '"other"', 1))
    with pytest.raises(CheckpointError, match="holds none"):
        load_checkpoint(path, make_trainer(CALIBRATED, "qwen3"))


# ---- one-sided


def test_a_one_sided_rollout_is_counted_and_never_aborts():
    decoder = tiny_decoder("llama", "bf16", pack_tokens=128)
    contract = preset("fp8-kv", pack_tokens=128)
    sampled = Decoder(decoder.spec, contract)
    sampled.copy_from(decoder)
    trainer = Trainer(decoder, rollout_identity=identity(contract))
    assert trainer.one_sided
    batch = drawn(trainer, Engine(sampled))
    result = trainer.forward_backward(batch, PolicyLoss())
    assert 0 < result.mismatched_tokens <= result.compared_tokens
    exact = Trainer(tiny_decoder("llama", "bf16", pack_tokens=128))
    with pytest.raises(ContractError, match="sample 0"):
        exact.forward_backward(batch, PolicyLoss())
    trainer.optim_step()
    sampled.copy_from(decoder)
    fresh = Decoder(decoder.spec, contract).load((n, h.value()) for n, h in decoder.weights.items())
    assert sampled.digests() == fresh.digests() and sampled.version == 1


def test_a_calibrated_trainer_uses_its_own_scales_for_a_one_sided_rollout():
    decoder = tiny_decoder("llama", pack_tokens=128, **CALIBRATED)
    contract = preset("bf16", pack_tokens=128)
    sampled = Decoder(decoder.spec, contract)
    sampled.copy_from(decoder)
    trainer = Trainer(decoder, rollout_identity=identity(contract))
    batch = drawn(trainer, Engine(sampled))
    with pytest.raises(ContractError, match="none are known"):
        trainer.forward_backward(batch, PolicyLoss())
    first = decoder.calibrate(PROMPTS)
    for _ in range(2):
        assert trainer.forward_backward(batch, PolicyLoss()).compared_tokens >= 0
        trainer.optim_step()
    assert decoder.kv_scales.name != first.name


def test_a_one_sided_rollout_with_filters_is_refused():
    decoder = tiny_decoder("llama", "bf16")
    contract = preset("fp8")
    sampled = Decoder(decoder.spec, contract)
    sampled.copy_from(decoder)
    trainer = Trainer(decoder, rollout_identity=identity(contract))
    samples = tuple(Engine(sampled).generate(PROMPTS, SamplingParams(top_k=3, max_tokens=4)))
    batch = TrainBatch(samples, np.ones(2), tuple(np.ones(len(s.completion_ids), bool) for s in samples))
    with pytest.raises(ContractError, match="top_k"):
        trainer.forward_backward(batch, PolicyLoss())
