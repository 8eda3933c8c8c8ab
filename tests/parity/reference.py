"""transformers as the reference for whole models: log-probs and gradients, and how far from them an implementation that
rounds may be."""

import numpy as np
import torch
import transformers

from zerogap.models.decoder import Decoder
from zerogap.numerics import preset
from zerogap.types import Sample, SamplingKey, SamplingParams, TrainBatch
from zerogap.weights import open_model

LIMIT = 2e-4  # of log-probs in FP32
PEAK = 8.0  # standard deviation of logits: a wrong layer shows


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


def noisy_gradients(model, delta, seed, *args, inside=None):
    """`reference_gradients` with an error of +-delta * rms planted wherever the arithmetic under test rounds.

    An implementation that rounds is, to first order, the exact one with each intermediate result, and each result of
    its backward, moved by its rounding error. So if `delta` bounds those errors relative to their tensor's rms, the
    distance of these gradients from the exact ones is what an implementation of that arithmetic may be away.

    Args:
        inside: what is told how to move results that no module returns, by its `shake` (`routed_reference.Inside`).
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
    if inside is not None:
        inside.shake = shake_both
    try:
        gradients = reference_gradients(model, *args)
    finally:
        for handle in handles:
            handle.remove()
        if inside is not None:
            inside.shake = None
    return {name: shake(gradient) for name, gradient in gradients.items()}


def distance(a, b):
    return float((a - b).square().sum().sqrt())
