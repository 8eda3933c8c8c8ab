"""Gradients of routed and latent families against transformers in float64, within the bound that rounding allows.

As for the dense families (`noisy_gradients`); the reference runs the experts that the implementation chose
(`routed_reference`).
"""

import pytest
import torch

from tests.parity.reference import distance, grpo_batch, load, noisy_gradients, reference, reference_gradients
from tests.parity.routed_reference import choices, experts_apart, open_up, same_choices
from tests.parity.test_transformers_moe import SPECS, deepseek, qwen
from zerogap.numerics import preset
from zerogap.rl.loss import PolicyLoss
from zerogap.train.trainer import Trainer
from zerogap.weights.random_model import write_random_model

CASES = {
    "qwen": qwen(hidden_size=192, intermediate_size=512),
    "qwen: weights as they are": qwen({"normalise": False, "top_k": 3}, hidden_size=192, dense=(0,)),
    "deepseek": deepseek(hidden_size=192, intermediate_size=512),
    "deepseek: as Moonlight": SPECS["deepseek: as Moonlight"],
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("numerics", "delta"),
    [
        # FP32: as for the dense families; the longest sum here has K = 512, too.
        ("fp32", 512**0.5 * 2.0**-24),
        # BF16: at most four roundings between two places that are moved (projection, absorbed query, probabilities,
        # latent output, head output), each of at most 2^-9.
        ("bf16", 4 * 2.0**-9),
    ],
)
def test_grpo_gradients_are_within_the_derived_bound_of_float64(tmp_path, name, numerics, delta):
    spec = CASES[name]
    folder = write_random_model(tmp_path / "m", spec, peak=2.0, storage=preset(numerics).storage)
    trainer = Trainer(load(folder, numerics), micro_batch_tokens=64)
    texts, batch = grpo_batch(trainer)
    chosen = choices(trainer, texts)
    trainer.forward_backward(batch, PolicyLoss("dapo", beta=0.1))
    ours = {name: g.double() for name, g in zip(trainer.trainable, trainer._gradients, strict=True)}
    model = reference(folder, torch.float64)
    inside = open_up(model, spec, chosen)
    exact = experts_apart(reference_gradients(model, texts, batch, 0.1), spec)
    if numerics == "fp32":
        assert same_choices(inside) == 1.0
    slightly_wrong = experts_apart(reference_gradients(model, texts, batch, 0.101), spec)
    noisy = [
        experts_apart(noisy_gradients(model, delta, seed, texts, batch, 0.1, inside=inside), spec) for seed in range(2)
    ]
    assert set(ours) == set(exact)
    for tensor, gradient in exact.items():
        bound = max(distance(moved[tensor], gradient) for moved in noisy)
        error = distance(ours[tensor].view(gradient.shape), gradient)
        print(f"{numerics} {tensor}: error / bound {error / bound:.3f}, bound / size {bound / gradient.norm():.1e}")
        assert error <= bound, tensor
        assert bound < 0.5 * gradient.norm(), f"{tensor}: the bound says nothing"
        if numerics == "fp32":  # a control: one percent more KL is seen in every tensor
            assert distance(slightly_wrong[tensor], gradient) > bound, tensor
