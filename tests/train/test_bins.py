"""Gradient bins are combined by the fixed tree, bit for bit: leaves of a head norm first, tied parts last, once."""

import pytest
import torch

from tests.bits import assert_same_bits, hard_values
from zerogap.ops.handle import WeightHandle
from zerogap.train.bins import GradientBins
from zerogap.types import WeightSpec

SPECS = {
    "matrix": WeightSpec("a.weight", (3, 40), "matrix"),
    "head norm of 4 leaves": WeightSpec("b.weight", (32,), "vector", head_leaves=4),
    "tied embedding": WeightSpec("c.weight", (5, 40), "embedding", out_leaf_size=64),
}


def tree(parts: list[torch.Tensor]) -> torch.Tensor:
    """The contract's tree over FP32 parts: adjacent pairs, an odd last one passes up."""
    while len(parts) > 1:
        pairs = [a + b for a, b in zip(parts[0::2], parts[1::2], strict=False)]
        parts = pairs + parts[2 * len(pairs) :]
    return parts[0]


def in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


@pytest.mark.parametrize("bins", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", list(SPECS))
def test_bins_are_the_fixed_tree(kind, bins):
    handle = WeightHandle(SPECS[kind], torch.bfloat16)
    collected, sums, heads = GradientBins([handle], bins), [], []
    for number in range(bins):
        collected.open()
        grad = hard_values(tuple(handle.grad.shape), torch.float32, seed=number)
        if number == 1:
            grad = torch.zeros_like(grad)  # an empty bin is added like any other
        handle.grad.copy_(grad)
        sums.append(tree(list(grad)) if SPECS[kind].head_leaves else grad)
        if handle.head_grad is not None:
            heads.append(hard_values(tuple(grad.shape), torch.float32, seed=100 + number))
            handle.head_grad.copy_(heads[-1])
        collected.close()
    expected = tree(sums) + tree(heads) if heads else tree(sums)
    (actual,) = collected.finish()
    assert_same_bits(actual, expected, kind)
    if bins >= 4 and not heads:  # the control: another order has other bits
        assert not torch.equal(actual, in_order(sums))


def test_an_open_or_missing_bin_is_noticed():
    collected = GradientBins([WeightHandle(SPECS["matrix"], torch.bfloat16)], 2)
    collected.open()
    collected.close()
    with pytest.raises(AssertionError, match="1 of 2 bins"):
        collected.finish()
