"""The memory plan against real trainers and engines: byte by byte where they can be counted, in bands elsewhere."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch

from tests.tiny import FAMILIES, MOE_FAMILIES, tiny_decoder, tiny_spec
from zerogap.config import load_config
from zerogap.errors import ConfigError
from zerogap.models import memory
from zerogap.models.advice import advice, with_words
from zerogap.models.decoder import Decoder
from zerogap.models.layout import Layout
from zerogap.models.moe_spec import MoESpec
from zerogap.numerics import preset
from zerogap.ops.moe import Routing
from zerogap.rl.setup import scoring_trainer
from zerogap.rollout.engine import Engine
from zerogap.rollout.speculate import Speculation
from zerogap.train.bins import GradientBins
from zerogap.train.packing import build_micro_batch, plan_packs
from zerogap.train.trainer import Trainer
from zerogap.types import Sample, SamplingKey, SamplingParams

ONE = Layout()


def nbytes(*tensors):
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def held(trainer):
    """Bytes that a trainer holds, by part, counted on its tensors."""
    handles = trainer.decoder.weights.values()
    bins = GradientBins(trainer.handles, 1)
    bins.open()
    optimizer = trainer.optimizer
    parts = [part for h in handles for part in (h.first, h.second) if part is not None]
    by_head = [panels for part in parts for panels in (part.panels, part.transposed)]
    return {
        "forward": sum(nbytes(h.panels, h.rows) for h in handles) + nbytes(*by_head),
        "scales": sum(nbytes(h.scales) for h in handles),
        "transposed": sum(nbytes(h.transposed) for h in handles),
        "published": sum(nbytes(h.published) for h in handles),
        "master": sum(nbytes(h.master) for h in handles),
        "moments": nbytes(*optimizer.first, *optimizer.second),
        "gradient": sum(nbytes(h.grad, h.head_grad) for h in handles),
    }


@pytest.mark.parametrize("trainable", [("all",), ("last:1",), ("model.layers.0.mlp.*",), ("lm_head.weight",), ()])
@pytest.mark.parametrize("numerics", ["fp32", "bf16", "fp8"])
@pytest.mark.parametrize("family", [*FAMILIES, *MOE_FAMILIES])
def test_weights_and_training_state_are_those_of_a_trainer(family, numerics, trainable):
    decoder = tiny_decoder(family, numerics)
    if decoder.spec.tied and trainable == ("lm_head.weight",):
        trainable = ("model.embed_tokens.weight",)
    planned = memory.weight_bytes(decoder.spec, decoder.numerics, trainable, ONE)
    assert planned == held(Trainer(decoder, trainable=trainable))


def test_fp8_with_bf16_gradients_has_both_kinds_of_panels():
    decoder = tiny_decoder("qwen3", "fp8", linear_grad="bf16", bf16_first=1)
    planned = memory.weight_bytes(decoder.spec, decoder.numerics, ("last:1",), ONE)
    assert planned == held(Trainer(decoder, trainable="last:1"))


def sample_of(prompt, completion, identity):
    ids = np.arange(1, prompt + completion + 1, dtype=np.int32)
    numbers, versions = np.zeros(completion, np.float32), np.full(completion, -1)
    facts = (identity, SamplingKey(), SamplingParams(), "stop")
    return Sample(ids[:prompt], ids[prompt:], numbers, versions, *facts)


class Box:
    """Stands for a saved tensor, and lives as long as the graph that saved it."""

    def __init__(self, tensor):
        self.tensor = tensor


class Kept:
    """Counts the memory that autograd keeps, each tensor once."""

    def __init__(self):
        self.boxes = weakref.WeakSet()

    def take(self, tensor):
        box = Box(tensor)
        self.boxes.add(box)
        return box

    def bytes_without(self, *others):
        there = {tensor.untyped_storage().data_ptr() for tensor in others}
        saved = [box.tensor.untyped_storage() for box in self.boxes]
        return sum({s.data_ptr(): s.nbytes() for s in saved if s.data_ptr() not in there}.values())


@pytest.mark.parametrize("trainable", ["all", "last:1", "model.layers.0.mlp.*", "model.norm.weight"])
@pytest.mark.parametrize(
    ("family", "numerics", "recompute"),
    [
        ("llama", "fp32", False),
        ("qwen3", "fp8-kv", True),
        ("qwen3_moe", "bf16", False),
        ("qwen3_moe", "fp8-kv", True),
        ("deepseek_v3", "fp8", False),
        ("deepseek_v3", "bf16", True),
    ],
)
def test_activations_are_what_a_forward_pass_keeps(family, numerics, recompute, trainable):
    """All but a few numbers per token, which belong to the batch and to the head's rows."""
    trainer = Trainer(tiny_decoder(family, numerics), trainable=trainable, activation_recompute=recompute)
    decoder, tokens = trainer.decoder, 192
    samples = [sample_of(1, 95, decoder.identity)] * 2  # all rows but the last have outputs
    (packs,) = plan_packs([s.num_tokens for s in samples], 1, 1024)
    micro = build_micro_batch(packs, samples)
    kept = Kept()
    with torch.autograd.graph.saved_tensors_hooks(kept.take, lambda box: box.tensor):
        graph = trainer._forward(micro, None, None)
    spec, contract = decoder.spec, decoder.numerics
    names = trainer.trainable
    planned = memory.activation_bytes(spec, contract, names, ONE, tokens, recompute)
    if recompute:  # the block that is computed again does not exist yet
        planned -= largest_block(spec, contract, names, tokens)
    head = spec.hidden_size * contract.storage.nbytes * 2  # rows of the head that the plan has and the samples have not
    few = 64 * tokens
    found = kept.bytes_without(decoder.rope_table)
    assert planned - head <= found <= planned + few, (found, planned)
    assert graph[0].requires_grad


def largest_block(spec, contract, names, tokens):
    sizes = []
    for layer in range(spec.num_layers):
        one = dataclasses.replace(spec, num_layers=1)
        if spec.moe is not None:  # the first layer of a model may be a dense one, this one need not be
            dense = (0,) if layer in spec.moe.dense_layers else ()
            one = dataclasses.replace(one, moe=dataclasses.replace(spec.moe, dense_layers=dense))
        ours = [n.replace(f"layers.{layer}.", "layers.0.") for n in names if f"layers.{layer}." in n]
        below = any(memory.layer_of(n) in range(layer) for n in names) or "model.embed_tokens.weight" in names
        inside = memory.activation_bytes(
            one, contract, ["model.embed_tokens.weight"] if below else ours, ONE, tokens, False
        )
        tail = 2 * tokens * spec.hidden_size * contract.storage.nbytes
        sizes.append(max(0, inside - tail))
    return max(sizes)


def config_of(numerics="bf16", *words, **optimizer):
    tree = {
        "model": "any",
        "numerics": numerics,
        "data": {"train": "multiplication", "max_prompt_length": 224},
        "rollout": {
            "max_completion_length": 32,
            "num_generations": 2,
            "kv_cache_memory": 0.03,
            "max_sequences": 8,
            "max_batch_tokens": 256,
        },
        "optimizer": {"max_steps": 1, "micro_batch_tokens": 2048, **optimizer},
    }
    return load_config(tree, words)


@pytest.mark.parametrize("memory_gib", [0.0005, 1.0])  # what the budget buys, and what all sequences need
@pytest.mark.parametrize("numerics", ["fp32", "bf16", "fp8-kv"])
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_the_cache_is_the_engines(family, numerics, memory_gib):
    config = config_of(numerics, f"rollout.kv_cache_memory={memory_gib}")
    decoder = tiny_decoder(family, numerics)
    engine = Engine(
        Decoder(decoder.spec, decoder.numerics, max_positions=memory.sequence_tokens(config)),
        kv_cache_bytes=int(memory_gib * 2**30),
        max_batch_tokens=256,
        max_sequences=8,
    )
    cache = engine._cache
    planned = memory.memory_plan(decoder.spec, config).bytes_of("KV cache")
    assert planned == cache.num_pages * cache.page_bytes
    pages = [t for kv in cache.layers for t in (kv.keys, kv.values, kv.key_scales, kv.value_scales) if t is not None]
    blocks = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in pages}
    assert planned == sum(blocks.values())


@pytest.mark.parametrize(("draft_tokens", "rows"), [(0, 8), (2, 24), (16, 136)])
def test_rows_that_verify_guesses_have_logits_too(draft_tokens, rows):
    config = config_of("bf16", f"rollout.speculation.draft_tokens={draft_tokens}")
    decoder = tiny_decoder("llama")
    plain = memory.memory_plan(decoder.spec, config_of("bf16")).bytes_of("engine buffers")
    more = memory.memory_plan(decoder.spec, config).bytes_of("engine buffers") - plain
    assert more == (rows - 8) * 4 * decoder.spec.vocab_size
    engine = Engine(decoder, max_batch_tokens=256, max_sequences=8, speculation=Speculation(draft_tokens))
    assert len(engine._batch.output_rows) == rows


@pytest.mark.parametrize("numerics", ["bf16", "fp8"])
@pytest.mark.parametrize("family", ["llama", *MOE_FAMILIES])
def test_copies_are_counted_as_they_are_held(family, numerics):
    """A reference model, and the copy that a one-sided rollout samples from."""
    spec = tiny_spec(family)
    plan = memory.memory_plan(spec, config_of(numerics, "algorithm.beta=0.1"))
    scoring = held(scoring_trainer(tiny_decoder(family, numerics), 1024))
    assert plan.bytes_of("reference model") == sum(scoring.values())
    other = {"bf16": "fp8", "fp8": "bf16"}[numerics]
    plan = memory.memory_plan(spec, config_of(numerics, f"rollout.numerics={other}"))
    rollout = held(scoring_trainer(tiny_decoder(family, other), 1024))
    assert plan.bytes_of("rollout's weights") == sum(rollout.values()) - rollout["transposed"]
    assert memory.memory_plan(spec, config_of(numerics)).bytes_of("rollout's weights") == 0


@pytest.mark.parametrize(("bins", "sums"), [(1, 1), (2, 2), (8, 4)])
def test_sums_of_gradients_that_exist_at_a_time(bins, sums):
    """As many as train.bins holds while the last bin is open."""
    decoder = tiny_decoder("llama", "bf16", grad_bins=bins)
    trainer = Trainer(decoder)
    filled, most = GradientBins(trainer.handles, bins), 0
    for _ in range(bins):
        filled.open()
        folded = sum(nbytes(*part) for _, part in filled._folded)
        most = max(most, folded + sum(nbytes(h.grad, h.head_grad) for h in trainer.handles))
        filled.close()
    assert memory.weight_bytes(decoder.spec, decoder.numerics, ("all",), ONE)["gradient"] == most
    one = tiny_decoder("llama", "bf16")
    assert most == sums * memory.weight_bytes(one.spec, one.numerics, ("all",), ONE)["gradient"]


def test_layouts_split_what_leaves_and_experts_allow():
    spec, contract = tiny_spec("qwen3_moe", num_heads=8, num_kv_heads=4, head_dim=128), preset("bf16")
    specs = spec.weight_specs(contract)
    ranks = {name: Layout(tp=4, ep=8, dp=2).ranks_of(weight, contract) for name, weight in specs.items()}
    layer = "model.layers.0."
    assert ranks[layer + "self_attn.q_proj.weight"] == ranks[layer + "self_attn.o_proj.weight"] == 4
    assert ranks[layer + "self_attn.k_proj.weight"] == 4
    assert ranks[layer + "mlp.experts.7.gate_proj.weight"] == 8
    assert ranks[layer + "mlp.gate.weight"] == ranks["model.norm.weight"] == 1
    assert ranks["lm_head.weight"] == ranks["model.embed_tokens.weight"] == 4
    whole, split = (memory.memory_plan(spec, config_of(), layout).total for layout in (ONE, Layout(tp=1, ep=8, dp=8)))
    assert split < whole
    experts = sum(w.shape[0] * w.shape[1] for w in specs.values() if w.stack is not None)
    one, eight = (memory.weight_bytes(spec, contract, ("all",), y)["master"] for y in (ONE, Layout(1, 8, 8)))
    assert one - eight == 4 * experts * 7 // 8


@pytest.mark.parametrize(
    ("text", "devices", "message"),
    [
        ("tp=2,tp=2", None, "once"),
        ("pp=2", None, "tp=1,ep=8,dp=8"),
        ("tp=0", None, "positive"),
        ("tp=2,dp=2", 8, "there are 8 devices"),
        ("tp=3", 8, "divide the 8 devices"),
        ("ep=3,dp=4", None, "ep must divide the 4 devices"),
    ],
)
def test_layouts_that_are_none(text, devices, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        Layout.parse(text, devices)


def test_a_layout_needs_experts_to_split():
    assert Layout.parse("tp=2,ep=4", 8) == Layout(2, 4, 4)
    assert Layout.parse(None, None) == ONE
    with pytest.raises(ConfigError, match="no experts"):
        Layout(1, 2, 2).require(tiny_spec("llama"))
    with pytest.raises(ConfigError, match="8 experts"):
        Layout(1, 3, 3).require(tiny_spec("qwen3_moe"))


def test_advice_names_what_helps_and_says_truly_what_it_takes():
    spec = tiny_spec("qwen3", num_layers=8)
    config = config_of("bf16", "algorithm.beta=0.1")
    total = memory.memory_plan(spec, config).total

    def checked(room):
        found = advice(spec, config, ONE, room)
        for change in found:
            assert change.total == memory.memory_plan(spec, with_words(config, change.words)).total < total
            assert change.fits == (change.total <= room)
        return found

    singles = checked(1)
    keys = [change.words[0].partition("=")[0] for change in singles]
    no_bit = ["optimizer.activation_recompute", "optimizer.micro_batch_tokens", "rollout.kv_cache_memory"]
    assert keys == [*no_bit, "algorithm.beta", "trainable", "trainable"]
    assert all(len(change.words) == 1 for change in singles)
    best = min(change.total for change in singles)
    assert any(change.fits for change in checked(best))
    (*_, together) = checked(best - 1)
    assert together.fits and len(together.words) == len({word.partition("=")[0] for word in together.words}) > 1


def test_advice_names_the_fewest_devices_that_have_room():
    spec, config = tiny_spec("qwen3_moe", moe=MoESpec(Routing(64, 8), 512)), config_of("bf16", "trainable=last:1")
    total = memory.memory_plan(spec, config).total
    (*_, last) = advice(spec, config, ONE, total // 2)
    assert last.words == ("--devices 4 --layout tp=1,ep=4,dp=4",) and last.fits
    assert last.total == memory.memory_plan(spec, config, Layout(1, 4, 4)).total <= total // 2
    assert memory.memory_plan(spec, config, Layout(1, 2, 2)).total > total // 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("numerics", "trainable", "recompute"), [("bf16", "all", "false"), ("fp8-kv", "last:1", "true")]
)
def test_a_step_takes_what_was_planned(numerics, trainable, recompute):
    """Resident memory of a process that does one step. malloc is told to give back what is freed at once.

    Blocks below its threshold (Python's objects, graph nodes, small tensors) are not in the plan and not given back;
    they do not grow with the model.
    """
    config = config_of(numerics, f"trainable={trainable}", f"optimizer.activation_recompute={recompute}")
    done = subprocess.run(
        [sys.executable, "-m", "tests.models.peak_memory", config.model_dump_json()],
        capture_output=True,
        check=True,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(256 * 1024)},
    )
    found = json.loads(done.stdout)
    small = 8 * 2**20
    assert 0.85 * found["planned"] <= found["measured"] <= 1.02 * found["planned"] + small, found
