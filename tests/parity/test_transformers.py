"""Right, not only equal on both sides: every dense family against transformers, log-probs and gradients.

Models are random with peaked logits (standard deviation 8, so that a wrong layer shows), scaled RoPE with its threshold
at 256 and positions up to 1,024. Log-probs in FP32 must agree to 2e-4. Gradients of a GRPO loss are held against a
float64 run of transformers, within a bound that is derived, not chosen: see `noisy_gradients`.
"""

import dataclasses

import numpy as np
import pytest
import torch

from tests.models_on_disk import LLAMA3_ROPE, tiny_spec
from tests.parity.reference import (
    LIMIT,
    PEAK,
    as_sample,
    distance,
    grpo_batch,
    load,
    noisy_gradients,
    random_ids,
    reference,
    reference_gradients,
    reference_logprobs,
)
from zerogap.models.decoder import Decoder
from zerogap.models.rope_spec import RopeSpec
from zerogap.numerics import DType, preset
from zerogap.rl.loss import PolicyLoss
from zerogap.train.trainer import Trainer
from zerogap.weights import open_model
from zerogap.weights.random_model import write_random_model

FAMILIES = {"llama": True, "qwen2": False, "qwen3": True}  # family -> tied head


def parity_spec(family, rope=LLAMA3_ROPE, tied=None):
    tied = FAMILIES[family] if tied is None else tied
    return tiny_spec(family, tied, hidden_size=192, intermediate_size=512, rope=rope)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rope", [LLAMA3_ROPE, RopeSpec(1e6)], ids=["llama3", "default"])
def test_fp32_logprobs_equal_transformers_to_2e4(tmp_path, family, rope):
    folder = write_random_model(tmp_path / "m", parity_spec(family, rope), peak=PEAK, storage=DType.FP32)
    trainer = Trainer(load(folder, "fp32"))
    texts = random_ids(1024, 1, 37, 130)
    texts[1] = random_ids(2, seed=5)[0]
    ours = trainer.logprobs([as_sample(ids, trainer.decoder.identity) for ids in texts])
    model = reference(folder)
    for ids, logp in zip(texts, ours, strict=True):
        theirs = reference_logprobs(model, ids).numpy()
        assert theirs.min() < -10 or len(ids) < 10, "logits must be peaked for this to say anything"
        assert np.abs(theirs - logp).max() <= LIMIT


@pytest.mark.parametrize("family", FAMILIES)
def test_the_comparison_sees_a_wrong_rope_and_a_wrong_norm(tmp_path, family):
    """Controls: the same weights under default RoPE, or with another epsilon, are far outside the limit."""
    folder = write_random_model(tmp_path / "m", parity_spec(family), peak=PEAK, storage=DType.FP32)
    (ids,) = random_ids(600)
    theirs = reference_logprobs(reference(folder), ids).numpy()
    files = open_model(folder)
    other_norm = dataclasses.replace(files.spec, norm_eps=1e-3)
    for wrong in (dataclasses.replace(files.spec, rope=RopeSpec(LLAMA3_ROPE.theta)), other_norm):
        decoder = Decoder(wrong, preset("fp32")).load(files.tensors())
        (logp,) = Trainer(decoder).logprobs([as_sample(ids, decoder.identity)])
        assert np.abs(theirs - logp).max() > 10 * LIMIT


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_is_no_further_from_fp32_than_transformers_bf16(tmp_path, family):
    """Mean |ours in BF16 - transformers in FP32| against mean |transformers in BF16 - transformers in FP32|."""
    folder = write_random_model(tmp_path / "m", parity_spec(family), peak=4.0, storage=DType.BF16)
    trainer = Trainer(load(folder, "bf16"))
    texts = random_ids(400, 300, 200, seed=3)
    ours = np.concatenate(trainer.logprobs([as_sample(ids, trainer.decoder.identity) for ids in texts]))
    exact, half = reference(folder), reference(folder, torch.bfloat16)
    theirs = np.concatenate([reference_logprobs(exact, ids).numpy() for ids in texts])
    rounded = np.concatenate([reference_logprobs(half, ids).numpy() for ids in texts])
    assert np.abs(ours - theirs).mean() <= np.abs(rounded - theirs).mean()


# ---------------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("numerics", "delta"),
    [
        # FP32: the rounding errors of a sum of K terms add up like a random walk, sqrt(K) * 2^-24 (Higham and Mary,
        # "A new approach to probabilistic rounding error analysis", 2019); the longest sum here has K = 512.
        ("fp32", 512**0.5 * 2.0**-24),
        # BF16: at most three roundings between two places that `noisy_gradients` moves (projection, query/key norm,
        # RoPE), each of at most 2^-9; the FP32 sums inside are negligible against them.
        ("bf16", 3 * 2.0**-9),
    ],
)
def test_grpo_gradients_are_within_the_derived_bound_of_float64(tmp_path, family, numerics, delta):
    folder = write_random_model(tmp_path / "m", parity_spec(family), peak=2.0, storage=preset(numerics).storage)
    trainer = Trainer(load(folder, numerics), micro_batch_tokens=64)
    texts, batch = grpo_batch(trainer)
    trainer.forward_backward(batch, PolicyLoss("dapo", beta=0.1))
    ours = {name: g.double() for name, g in zip(trainer.trainable, trainer._gradients, strict=True)}
    model = reference(folder, torch.float64)
    exact = reference_gradients(model, texts, batch, 0.1)
    slightly_wrong = reference_gradients(model, texts, batch, 0.101)
    assert set(ours) == set(exact)
    noisy = [noisy_gradients(model, delta, seed, texts, batch, 0.1) for seed in range(2)]
    for name, gradient in exact.items():
        bound = max(distance(moved[name], gradient) for moved in noisy)
        error = distance(ours[name].view(gradient.shape), gradient)
        print(f"{numerics} {name}: error / bound {error / bound:.3f}, bound / size {bound / gradient.norm():.1e}")
        assert error <= bound, name
        assert bound < 0.5 * gradient.norm(), f"{name}: the bound says nothing"
        if numerics == "fp32":  # a control: one percent more KL is seen in every tensor
            assert distance(slightly_wrong[name], gradient) > bound, name
