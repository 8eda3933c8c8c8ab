"""Right, not only equal on both sides: every family against transformers, log-probs and gradients.

Models are random with peaked logits (standard deviation 8, so that a wrong layer shows), scaled RoPE with its threshold
at 256 and positions up to 1,024. Log-probs in FP32 must agree to 2e-4. Gradients of a GRPO loss are held against a
float64 run of transformers, within a bound that is derived, not chosen: see `noisy_gradients`.
"""

import dataclasses

import numpy as np
import pytest
import torch
import transformers

from tests.models_on_disk import LLAMA3_ROPE, tiny_spec
from zerogap.models.decoder import Decoder
from zerogap.models.rope_spec import RopeSpec
from zerogap.numerics import DType, preset
from zerogap.rl.loss import PolicyLoss
from zerogap.train.trainer import Trainer
from zerogap.types import Sample, SamplingKey, SamplingParams, TrainBatch
from zerogap.weights import open_model
from zerogap.weights.random_model import write_random_model

FAMILIES = {"llama": True, "qwen2": False, "qwen3": True}  # family -> tied head
LIMIT = 2e-4
PEAK = 8.0


def parity_spec(family, rope=LLAMA3_ROPE, tied=None):
    tied = FAMILIES[family] if tied is None else tied
    return tiny_spec(family, tied, hidden_size=192, intermediate_size=512, rope=rope)


def reference(folder, dtype=torch.float32):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=dtype)


def reference_logprobs(model, ids, grad=False):
    """[T - 1] log-probs of ids[1:], the softmax in float64."""
    row = torch.from_numpy(np.asarray(ids, np.int64))
    with torch.set_grad_enabled(grad):
        logits = model(row[None]).logits[0, :-1].double()
        return logits.log_softmax(-1).gather(1, row[1:, None])[:, 0]


def as_sample(ids, identity, prompt=1, logprobs=None, version=0):
    completion = np.asarray(ids[prompt:], np.int32)
    count = len(completion)
    return Sample(
        prompt_ids=np.asarray(ids[:prompt], np.int32),
        completion_ids=completion,
        logprobs=np.zeros(count, np.float32) if logprobs is None else logprobs,
        versions=np.full(count, version, np.int64),
        identity=identity,
        key=SamplingKey(),
        params=SamplingParams(),
        finish_reason="length",
    )


def random_ids(*lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 320, length).astype(np.int32) for length in lengths]


def load(folder, numerics, **changes):
    files = open_model(folder)
    return Decoder(files.spec, preset(numerics, **changes)).load(files.tensors())


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


def grpo_batch(trainer, seed=1):
    """Four samples whose old and reference log-probs differ from the current ones, so that clipping and KL act.

    No ratio is near a border of the clip range, where the gradient jumps and a rounding error could decide.
    """
    rng = np.random.default_rng(seed)
    texts, identity = random_ids(45, 12, 160, 6, seed=seed), trainer.decoder.identity
    current = trainer.logprobs([as_sample(ids, identity, 5) for ids in texts])

    def moved(logp):
        return (logp + rng.choice([-0.45, -0.05, 0.05, 0.45], len(logp))).astype(np.float32)

    samples = tuple(
        as_sample(ids, identity, 5, moved(logp), version=-1) for ids, logp in zip(texts, current, strict=True)
    )
    return texts, TrainBatch(
        samples=samples,
        advantages=rng.normal(0, 1, 4),
        masks=tuple(rng.random(len(logp)) > 0.2 for logp in current),
        ref_logprobs=tuple(moved(logp) for logp in current),
    )


def reference_gradients(model, texts, batch, beta):
    """Gradients by name of the token-mean clipped loss with the k3 estimate, by autograd in float64."""
    model.zero_grad()
    total = sum(int(mask.sum()) for mask in batch.masks)
    loss = torch.zeros((), dtype=torch.float64)
    for ids, sample, mask, ref, advantage in zip(
        texts, batch.samples, batch.masks, batch.ref_logprobs, batch.advantages, strict=True
    ):
        logp = reference_logprobs(model, ids, grad=True)[4:]
        ratio = (logp - torch.from_numpy(sample.logprobs).double()).exp()
        surrogate = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        gap = torch.from_numpy(ref).double() - logp
        per_token = surrogate + beta * (gap.exp() - 1 - gap)
        loss = loss + (per_token * torch.from_numpy(mask)).sum() / total
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def noisy_gradients(model, delta, seed, *args):
    """`reference_gradients` with an error of +-delta * rms planted wherever the arithmetic under test rounds.

    An implementation that rounds is, to first order, the exact one with each intermediate result, and each result of
    its backward, moved by its rounding error. So if `delta` bounds those errors relative to their tensor's rms, the
    distance of these gradients from the exact ones is what an implementation of that arithmetic may be away.
    """
    generator = torch.Generator().manual_seed(seed)

    def shake(value):
        sign = torch.randint(0, 2, value.shape, generator=generator, dtype=value.dtype) * 2 - 1
        return value + delta * value.detach().square().mean().sqrt() * sign

    def hook(_module, _inputs, output):
        if not isinstance(output, torch.Tensor):
            return (shake_both(output[0]), *output[1:])
        return shake_both(output)

    def shake_both(output):
        moved = shake(output)
        moved.register_hook(shake)
        return moved

    handles = [
        module.register_forward_hook(hook)
        for name, module in model.named_modules()
        if name.count(".") >= 1 and "rotary" not in name and not isinstance(module, torch.nn.ModuleList)
    ]
    handles.append(model.get_output_embeddings().register_forward_hook(hook))
    try:
        gradients = reference_gradients(model, *args)
    finally:
        for handle in handles:
            handle.remove()
    return {name: shake(gradient) for name, gradient in gradients.items()}


def distance(a, b):
    return float((a - b).square().sum().sqrt())


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
