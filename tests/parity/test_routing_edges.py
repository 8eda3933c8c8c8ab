"""Where routing is discrete: equal logits, an expert with every token, experts with none, no token at all; through
engine and trainer, before and after updates."""

import numpy as np
import pytest
import torch

from tests.bits import assert_different_bits, assert_same_bits
from tests.parity.routed_models import EMPTY, HOT, TIED_TO, decoder_of, deepseek, qwen
from zerogap.models.decoder import Decoder
from zerogap.rl.loss import PolicyLoss
from zerogap.rollout.engine import Engine
from zerogap.train.optimizer import OptimizerSettings
from zerogap.train.packing import PAGE_SIZE
from zerogap.train.trainer import BackwardResult, Trainer
from zerogap.types import ForwardContext, Sample, SamplingParams, TrainBatch

SPECS = {"qwen": qwen(num_layers=2), "deepseek": deepseek()}  # one routed layer each
LAYER = {"qwen": 0, "deepseek": 1}
PROMPTS = [list(range(3, 60)), list(range(3, 40)), [7, 8]]
families = pytest.mark.parametrize("family", SPECS)
contracts = pytest.mark.parametrize("numerics", ["bf16", "fp8-kv"])


def step(trainer: Trainer, engine: Engine) -> tuple[list[Sample], BackwardResult]:
    """Roll out, compare (a difference in one bit or one expert raises), update."""
    samples = engine.generate(PROMPTS, SamplingParams(max_tokens=9, stop_token_ids=()), num_samples=2)
    masks = tuple(np.ones(len(s.completion_ids), bool) for s in samples)
    batch = TrainBatch(tuple(samples), np.linspace(-1.0, 1.0, len(samples)), masks)
    result = trainer.forward_backward(batch, PolicyLoss())
    assert result.routing_compared == sum(int(s.routing.recorded.sum()) for s in samples) > 0
    assert result.compared_tokens == 54 and result.mismatched_tokens == result.routing_mismatched == 0
    trainer.optim_step()
    engine.update_weights(trainer)
    return samples, result


def pair(decoder: Decoder, trainable: tuple[str, ...] = ("all",)) -> tuple[Trainer, Engine]:
    trainer = Trainer(decoder, optimizer=OptimizerSettings(learning_rate=2e-3), trainable=trainable)
    # Chunks, few slots and a warm prefix cache: the engine meets the same tokens in other company than the trainer.
    return trainer, Engine.for_trainer(trainer, record_routing=True, max_batch_tokens=24, max_sequences=4)


@contracts
@families
def test_two_experts_with_equal_logits_are_the_same_one_on_both_sides(family, numerics):
    """The one with the lower index; the router is not trained, so the ties stay."""
    decoder = decoder_of(SPECS[family], numerics, "tied")
    trainer, engine = pair(decoder, ("*_proj*", "*norm.weight", "lm_head.weight"))
    for _ in range(2):
        samples, _ = step(trainer, engine)
        chosen = np.concatenate([s.routing.experts[s.routing.recorded, 0] for s in samples])
        margins = np.concatenate([s.routing.margins[s.routing.recorded, 0] for s in samples])
        tied = chosen[margins == 0]
        assert len(tied) > 10
        for experts in tied:
            eligible = [e for e in range(len(TIED_TO)) if _eligible(decoder, e, experts)]
            for expert in experts:
                twins = [e for e in eligible if e < expert and TIED_TO[e] == TIED_TO[expert]]
                assert set(twins) <= set(experts), f"{experts}: a twin of {expert} has a lower index"


def _eligible(decoder: Decoder, expert: int, chosen: np.ndarray) -> bool:
    """True if the expert stands in a group that was kept, as far as the choice tells."""
    routing = decoder.spec.moe.routing
    size = routing.num_experts // routing.groups
    return expert < routing.num_experts and expert // size in set(chosen // size)


@contracts
@families
def test_one_expert_takes_all_tokens_and_one_takes_none(family, numerics):
    """The one without tokens keeps its bits through every update; the other one learns."""
    decoder = decoder_of(SPECS[family], numerics, "steered")
    trainer, engine = pair(decoder)
    names = {e: f"model.layers.{LAYER[family]}.mlp.experts.{e}.down_proj.weight" for e in (HOT, EMPTY)}
    before = {e: decoder.weights[name].value().clone() for e, name in names.items()}
    for _ in range(2):
        samples, result = step(trainer, engine)
        for sample in samples:
            experts = sample.routing.experts[sample.routing.recorded, 0]
            assert (experts == HOT).any(1).all() and not (experts == EMPTY).any()
        assert result.routing.metrics["moe/idle_experts"] >= 1
    assert_same_bits(decoder.weights[names[EMPTY]].value(), before[EMPTY])
    assert_different_bits(decoder.weights[names[HOT]].value(), before[HOT])


@contracts
def test_one_expert_alone_takes_everything(numerics):
    """Top 1: all rows of a pass are one group, the other groups are empty."""
    decoder = decoder_of(qwen(5, 1), numerics, "steered")
    trainer, engine = pair(decoder)
    for _ in range(2):
        samples, result = step(trainer, engine)
        assert all((s.routing.experts[s.routing.recorded] == HOT).all() for s in samples)
        assert result.routing.metrics["moe/idle_experts"] == 4


@contracts
@families
def test_no_token_is_routed(family, numerics):
    """A pass without rows, forward and backward: nothing comes of it, and no gradient."""
    decoder = decoder_of(SPECS[family], numerics)
    handles = [decoder.weights[name] for name in decoder.set_trainable(("all",))]
    for handle in handles:
        handle.open_grad()
    none, borders = torch.zeros(0, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    pages = torch.zeros(1, 1, dtype=torch.int32)
    context = ForwardContext(none, none, pages, PAGE_SIZE, sample_starts=borders, pack_starts=borders)
    layers = decoder.scratch_kv(decoder.codec().allocate(1, PAGE_SIZE))
    hidden = decoder.hidden(torch.zeros(0, dtype=torch.int64), context, layers)
    assert hidden.shape == (0, decoder.spec.hidden_size)
    hidden.backward(torch.zeros_like(hidden))
    assert not any(handle.grad.any() for handle in handles if handle.grad is not None)
