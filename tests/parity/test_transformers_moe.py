"""Routed and latent families against transformers: log-probs, in many shapes of router, experts, heads and rotation.

As for the dense families: random models with peaked logits and spread router logits, positions beyond the rotation's
original context, FP32 log-probs within 2e-4. Each control is the same weights under one wrong fact.
"""

import dataclasses

import numpy as np
import pytest
import torch

from tests.models_on_disk import LLAMA3_ROPE, tiny_spec
from tests.parity.reference import LIMIT, PEAK, as_sample, load, random_ids, reference, reference_logprobs
from zerogap.models.decoder import Decoder
from zerogap.models.latent_spec import LatentSpec
from zerogap.models.moe_spec import MoESpec
from zerogap.models.rope_spec import RopeSpec
from zerogap.numerics import DType, preset
from zerogap.ops.latent import LatentSizes
from zerogap.ops.moe import Routing
from zerogap.train.trainer import Trainer
from zerogap.weights import open_model
from zerogap.weights.random_model import random_tensors, write_random_model

YARN = RopeSpec(10000.0, "yarn", 8.0, original_max_position=128)
# As DeepSeek-V3 has it: the attention factor is 1, and the scores' scale grows by (0.1 log(8) + 1)^2.
EVEN_MSCALE = dataclasses.replace(YARN, mscale=1.0, mscale_all_dim=1.0)
# Both act: cosines and sines shrink, the scale grows.
ODD_MSCALE = dataclasses.replace(YARN, mscale=0.707, mscale_all_dim=1.2, beta_fast=4.0)


def qwen(routing=None, rope=LLAMA3_ROPE, size=48, dense=(), **changes):
    rule = Routing(
        **{"num_experts": 6, "top_k": 2, "scoring": "softmax", "normalise": True, "scaling": 1.0, **(routing or {})}
    )
    return tiny_spec("qwen3_moe", rope=rope, moe=MoESpec(rule, size, dense_layers=dense), **changes)


def deepseek(routing=None, rope=EVEN_MSCALE, heads=(6, 32, 16, 64, 32), q_rank=64, shared=48, dense=(0,), **changes):
    rule = Routing(
        **{"num_experts": 8, "top_k": 3, "scoring": "sigmoid", "normalise": True, "scaling": 2.5}
        | {"groups": 4, "top_groups": 2, **(routing or {})}
    )
    sizes = LatentSizes(*heads)
    facts = {"num_heads": sizes.num_heads, "num_kv_heads": sizes.num_heads, "head_dim": sizes.nope + sizes.rope}
    facts["mla"] = LatentSpec(sizes, q_rank, interleaved=changes.pop("interleaved", True))
    facts["moe"] = MoESpec(rule, 48, shared, dense, has_bias=True)
    return tiny_spec("deepseek_v3", rope=rope, **facts | changes)


SPECS = {
    "qwen: two of six": qwen(),
    "qwen: weights as they are, one expert": qwen({"normalise": False, "top_k": 1}, RopeSpec(1e6)),
    "qwen: every expert, tied": qwen({"top_k": 6}, tied=True),
    "qwen: many experts, a dense layer, biases": qwen(
        {"num_experts": 32, "top_k": 8}, size=16, dense=(0,), qkv_bias=True, o_bias=True
    ),
    "qwen: yarn, as many keys as queries": qwen({"normalise": False, "top_k": 3}, YARN, num_kv_heads=6),
    "deepseek: groups, compressed queries, yarn": deepseek(),
    "deepseek: as Moonlight": deepseek(
        {"groups": 1, "top_groups": 1, "scaling": 2.446}, RopeSpec(5e4), q_rank=None, shared=96
    ),
    "deepseek: both scales of yarn, tied": deepseek({"groups": 2, "top_groups": 1}, ODD_MSCALE, tied=True),
    "deepseek: weights as they are, halves turn": deepseek({"normalise": False, "scaling": 1.0}, interleaved=False),
    "deepseek: many groups, no shared or dense layer": deepseek(
        {"num_experts": 32, "groups": 8, "top_groups": 4, "top_k": 6}, YARN, dense=()
    ),
    "deepseek: one expert, four heads, wide values, biases": deepseek(
        {"top_k": 1, "top_groups": 1}, heads=(4, 16, 32, 96, 48), q_rank=80, qkv_bias=True, o_bias=True
    ),
    "deepseek: another epsilon, which latents do not have": deepseek(norm_eps=0.05),
}


@pytest.mark.parametrize("name", SPECS)
def test_fp32_logprobs_equal_transformers_to_2e4(tmp_path, name):
    folder = write_random_model(tmp_path / "m", SPECS[name], peak=PEAK, storage=DType.FP32)
    trainer = Trainer(load(folder, "fp32"))
    texts = random_ids(700, 2, 130)
    ours = trainer.logprobs([as_sample(ids, trainer.decoder.identity) for ids in texts])
    model = reference(folder)
    for ids, logp in zip(texts, ours, strict=True):
        theirs = reference_logprobs(model, ids).numpy()
        assert theirs.min() < -10 or len(ids) < 10, "logits must be peaked for this to say anything"
        assert np.abs(theirs - logp).max() <= LIMIT


def wrong(spec, **changes):
    """The spec with facts of its routing, rotation or latents changed."""
    kinds = {"routing": Routing, "rope": RopeSpec, "mla": LatentSpec}
    fields = {kind: {f.name for f in dataclasses.fields(cls)} for kind, cls in kinds.items()}
    (kind,) = [kind for kind, names in fields.items() if set(changes) <= names]
    if kind == "routing":
        routing = dataclasses.replace(spec.moe.routing, **changes)
        return dataclasses.replace(spec, moe=dataclasses.replace(spec.moe, routing=routing))
    return dataclasses.replace(spec, **{kind: dataclasses.replace(getattr(spec, kind), **changes)})


CONTROLS = {
    "weights not divided by their sum": (qwen(), {"normalise": False}),
    "one expert less": (qwen(), {"top_k": 1}),
    "sigmoids for a softmax": (qwen(), {"scoring": "sigmoid"}),
    "another factor of the weights": (deepseek(), {"scaling": 2.4}),
    "no groups": (deepseek(), {"groups": 1, "top_groups": 1}),
    "one group less": (deepseek(), {"top_groups": 1, "top_k": 2}),
    "mscale_all_dim is missing from the scale": (
        deepseek(),
        {"mscale": 0.0, "mscale_all_dim": 0.0, "attention_factor": 1.0},
    ),
    "cosines are not scaled": (deepseek(rope=ODD_MSCALE), {"attention_factor": 1.0}),
    "no yarn": (deepseek(rope=YARN), {"kind": "default"}),
    "yarn's other bound": (deepseek(rope=ODD_MSCALE), {"beta_fast": 32.0}),
    "halves turn, not neighbours": (deepseek(), {"interleaved": False}),
    "latents with the model's epsilon": (deepseek(norm_eps=0.05), {"norm_eps": 0.05}),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_the_comparison_sees_what_is_wrong(tmp_path, name):
    spec, changes = CONTROLS[name]
    folder = write_random_model(tmp_path / "m", spec, peak=PEAK, storage=DType.FP32)
    (ids,) = random_ids(400)
    theirs = reference_logprobs(reference(folder), ids).numpy()
    decoder = Decoder(wrong(spec, **changes), preset("fp32")).load(open_model(folder).tensors())
    (logp,) = Trainer(decoder).logprobs([as_sample(ids, decoder.identity)])
    assert np.abs(theirs - logp).max() > 10 * LIMIT


def test_the_comparison_sees_a_missing_correction_bias(tmp_path):
    """Without it other experts are chosen."""
    spec = deepseek()
    folder = write_random_model(tmp_path / "m", spec, peak=PEAK, storage=DType.FP32)
    (ids,) = random_ids(400)
    theirs = reference_logprobs(reference(folder), ids).numpy()
    tensors = dict(random_tensors(spec, peak=PEAK, storage=DType.FP32))
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    decoder = Decoder(spec, preset("fp32")).load((tensors | {bias: torch.zeros(8)}).items())
    (logp,) = Trainer(decoder).logprobs([as_sample(ids, decoder.identity)])
    assert np.abs(theirs - logp).max() > 10 * LIMIT


@pytest.mark.parametrize(
    "spec", [qwen(), deepseek(), SPECS["deepseek: as Moonlight"]], ids=["qwen", "deepseek", "moonlight"]
)
def test_bf16_is_no_further_from_fp32_than_transformers_bf16(tmp_path, spec):
    """Mean |ours in BF16 - transformers in FP32| against mean |transformers in BF16 - transformers in FP32|."""
    folder = write_random_model(tmp_path / "m", spec, peak=4.0, storage=DType.BF16)
    trainer = Trainer(load(folder, "bf16"))
    texts = random_ids(400, 300, 200, seed=3)
    ours = np.concatenate(trainer.logprobs([as_sample(ids, trainer.decoder.identity) for ids in texts]))
    exact, half = reference(folder), reference(folder, torch.bfloat16)
    theirs = np.concatenate([reference_logprobs(exact, ids).numpy() for ids in texts])
    rounded = np.concatenate([reference_logprobs(half, ids).numpy() for ids in texts])
    print(np.abs(ours - theirs).mean(), np.abs(rounded - theirs).mean())
    assert np.abs(ours - theirs).mean() <= np.abs(rounded - theirs).mean()
