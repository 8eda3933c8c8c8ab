"""Global norm, AdamW and FP32 addition: the contract literally, accuracy, tails, threads."""

import math

import numpy as np
import pytest
import torch

from tests.bits import assert_different_bits, assert_same_bits, hard_values, unit_values
from tests.ops import elementwise_reference as reference
from zerogap.ops.cpu import library
from zerogap.ops.cpu.optim import NORM_CHUNK
from zerogap.ops.optim import adamw, global_norm, tree_add

SETTINGS = {"learning_rate": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def state(shape, seed: int = 0) -> list[torch.Tensor]:
    return [unit_values(shape, seed=seed), torch.zeros(shape), torch.zeros(shape)]


# ------------------------------------------------------------------------------------------------ AdamW


@pytest.mark.parametrize("count", [1, 15, 16, 17, 1000, 50001])
def test_adamw_is_the_contract(count: int) -> None:
    master, first, second = state(count)
    expected = [t.numpy().copy() for t in (master, first, second)]
    for step in (1, 2, 3, 1000):
        gradient, scale = hard_values(count, seed=step), 1.0 / step
        adamw(master, gradient, first, second, **SETTINGS, step=step, gradient_scale=scale)
        m, f, s = expected
        expected = reference.adamw(m, gradient.numpy(), f, s, **SETTINGS, step=step, gradient_scale=scale)
        for name, mine, theirs in zip(("master", "first", "second"), (master, first, second), expected, strict=True):
            assert_same_bits(mine, torch.from_numpy(theirs), f"{name} after step {step}")


def test_adamw_is_torch_within_rounding() -> None:
    """Against torch's AdamW in float64, step by step from the same state: some roundings of each quantity."""
    master, first, second = state(4000)
    for step in range(1, 20):
        gradient = unit_values(4000, seed=100 + step)
        weight = torch.nn.Parameter(master.double())
        weight.grad = gradient.double() * np.float64(np.float32(0.37))
        other = torch.optim.AdamW([weight], lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
        other.state[weight] = {
            "step": torch.tensor(float(step - 1)),
            "exp_avg": first.double(),
            "exp_avg_sq": second.double(),
        }
        other.step()
        sizes = 0.9 * first.double().abs() + 0.1 * weight.grad.abs()
        root = (other.state[weight]["exp_avg_sq"] / (1 - 0.95**step)).sqrt() + 1e-8
        adamw(master, gradient, first, second, **SETTINGS, step=step, gradient_scale=0.37)
        assert ((first.double() - other.state[weight]["exp_avg"]).abs() <= 5 * 2.0**-24 * sizes).all()
        assert ((second.double() / other.state[weight]["exp_avg_sq"] - 1).abs() <= 8 * 2.0**-24).all()
        moved = 3e-3 / (1 - 0.9**step) * sizes / root
        bound = (3 * weight.detach().abs() + 20 * moved) * 2.0**-24
        assert ((master.double() - weight.detach()).abs() <= bound).all()


def test_adamw_elements_threads_and_memory_places() -> None:
    """An element's bits do not depend on its place, its neighbours (NaN included), or threads."""
    whole, gradient = state(40000), hard_values(40000, seed=7)
    for threads in (1, 2, 3):
        again = state(40000)
        with library.use_threads(threads):
            adamw(again[0], gradient, again[1], again[2], **SETTINGS, step=2)
        if threads == 1:
            whole = again
        for one, two in zip(again, whole, strict=True):
            assert_same_bits(one, two, f"{threads} threads")
    bad = gradient.clone()
    bad[1::2] = math.nan
    beside = state(40000)
    adamw(beside[0], bad, beside[1], beside[2], **SETTINGS, step=2)
    for one, two in zip(beside, whole, strict=True):
        assert_same_bits(one[::2], two[::2], "beside NaN")
    for start in (1, 7, 39990):
        part = [t[start : start + 10].clone() for t in state(40000)]
        adamw(part[0], gradient[start : start + 10].clone(), part[1], part[2], **SETTINGS, step=2)
        for one, two in zip(part, whole, strict=True):
            assert_same_bits(one, two[start : start + 10], f"elements from {start}")


def test_adamw_edge_values() -> None:
    """No gradient and no moments: only the decay; a zero learning rate keeps the master; gradients are only read."""
    master, first, second = state(100)
    before, gradient = master.clone(), torch.zeros(100)
    adamw(master, gradient, first, second, **SETTINGS, step=1)
    assert_same_bits(master, before * np.float32(1 - 3e-3 * 0.1), "decayed")
    adamw(master, gradient, first, second, **SETTINGS | {"learning_rate": 0.0}, step=2)
    assert_same_bits(master, before * np.float32(1 - 3e-3 * 0.1), "kept")
    assert not gradient.any()
    with pytest.raises(AssertionError, match="count from 1"):
        adamw(master, gradient, first, second, **SETTINGS, step=0)


# ------------------------------------------------------------------------------------------------ norm


def squares(x: np.ndarray) -> list[float]:
    """FP64 sums of squares of chunks, literally."""
    sums = []
    for start in range(0, x.size, NORM_CHUNK):
        lanes = np.zeros(16)
        for i in range(start, min(start + NORM_CHUNK, x.size), 16):
            part = x[i : min(i + 16, start + NORM_CHUNK)].astype(np.float64)
            lanes[: part.size] += part * part
        for half in (8, 4, 2, 1):
            lanes[:half] += lanes[half : 2 * half]
        sums.append(float(lanes[0]))
    return sums


def test_norm_is_the_contract() -> None:
    gradients = [hard_values(n, seed=n, spread=20) for n in (5, 3 * NORM_CHUNK + 77, 16, NORM_CHUNK)]
    level = [s for g in gradients for s in squares(g.numpy())]
    while len(level) > 1:
        pairs = [level[i] + level[i + 1] for i in range(0, len(level) - 1, 2)]
        level = pairs + level[len(level) - len(level) % 2 :]
    expected = math.sqrt(level[0])
    for threads in (1, 2, 3):
        with library.use_threads(threads):
            assert global_norm(gradients) == expected, f"{threads} threads"
    assert global_norm([g.reshape(-1, 1) for g in gradients]) == expected, "shapes do not matter"
    exact = math.sqrt(math.fsum(float(v) ** 2 for g in gradients for v in g.double()))
    assert abs(expected - exact) <= exact * 2.0**-53 * (NORM_CHUNK / 16 + 4 + 3)
    assert global_norm([gradients[1], *gradients[:1], *gradients[2:]]) != expected, "the order of tensors shows"


def test_norm_edges() -> None:
    assert global_norm([]) == 0.0
    assert global_norm([torch.zeros(3, 4)]) == 0.0
    assert global_norm([torch.full((2,), 3e38)]) == pytest.approx(3e38 * 2**0.5, rel=1e-7)  # no FP32 overflow
    assert math.isnan(global_norm([torch.ones(20), torch.tensor([1.0, math.nan])]))
    assert math.isinf(global_norm([torch.ones(20), torch.tensor([1.0, math.inf])]))


# ------------------------------------------------------------------------------------------------ addition


def test_tree_add() -> None:
    a, b = hard_values((70, 1001), seed=1), hard_values((70, 1001), seed=2)
    for threads in (1, 2, 3):
        total = a.clone()
        with library.use_threads(threads):
            tree_add(total, b)
        assert_same_bits(total, a + b, f"{threads} threads")
    left, right = a.clone(), b.clone()
    tree_add(left[3], right[3])
    assert_same_bits(left[3], a[3] + b[3], "a row of a larger array")
    assert_same_bits(left[4], a[4], "its neighbour")
    assert_different_bits((a + b) - b, a, "rounding shows in this data")
    with pytest.raises(AssertionError, match="one shape"):
        tree_add(left, right[:3])
