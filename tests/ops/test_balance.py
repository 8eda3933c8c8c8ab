"""Balance loss and bias update: by hand, against a plain formula, row by row."""

import numpy as np
import pytest
import torch

from tests.bits import assert_same_bits
from zerogap.ops.balance import balance_losses, expert_counts, update_bias
from zerogap.ops.moe import Routing


def even_choice(tokens: int, experts: int, k: int) -> torch.Tensor:
    """Every expert equally often, ascending within a token."""
    rows = [sorted((t * k + j) % experts for j in range(k)) for t in range(tokens)]
    return torch.tensor(rows, dtype=torch.int32)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_even_loads_of_even_scores_are_1_and_one_expert_for_all_is_worst(scoring):
    rule = Routing(8, 2, scoring)
    starts = torch.tensor([0, 8, 16], dtype=torch.int32)
    even = balance_losses(torch.zeros(16, 8), even_choice(16, 8, 2), rule, starts)
    assert even == pytest.approx([1.0, 1.0], rel=1e-15)
    peaked = torch.full((16, 8), -60.0)
    peaked[8:, 3], peaked[8:, 5] = 60.0, 60.0
    same = torch.tensor([[3, 5]], dtype=torch.int32).repeat(16, 1)
    worst = balance_losses(peaked, same, rule, starts)
    assert worst[1] == pytest.approx(8 / 2, rel=1e-12)
    assert worst[0] == pytest.approx(1.0, rel=1e-12), "even scores, whatever the choice"


def test_it_is_the_papers_formula_and_a_sequence_stands_alone():
    generator = np.random.default_rng(4)
    logits = torch.from_numpy(generator.normal(size=(50, 6)).astype(np.float32) * 3)
    experts = logits.topk(3).indices.sort().values.int()
    rule, starts = Routing(6, 3, "sigmoid"), torch.tensor([0, 1, 20, 50], dtype=torch.int32)
    found = balance_losses(logits, experts, rule, starts)
    for i, (first, last) in enumerate(((0, 1), (1, 20), (20, 50))):
        s = torch.sigmoid(logits[first:last].double())
        chosen = torch.zeros_like(s).scatter(1, experts[first:last].long(), 1.0)
        f, p = chosen.mean(0) * 6 / 3, (s / s.sum(1, keepdim=True)).mean(0)
        assert found[i] == pytest.approx(float((f * p).sum()), rel=1e-12)
        alone = balance_losses(logits[first:last], experts[first:last], rule, torch.tensor([0, last - first]).int())
        assert alone[0] == found[i]


def test_counts():
    experts = torch.tensor([[[0, 2], [1, 2]], [[2, 3], [0, 3]]], dtype=torch.int32)
    assert expert_counts(experts, 5).tolist() == [[1, 1, 2, 0, 0], [1, 0, 1, 2, 0]]
    assert expert_counts(experts, 5).dtype == np.int64


def test_biases_move_towards_the_mean_by_fp32_additions():
    bias = torch.tensor([0.3, -1e-9, 0.3, 1.0], dtype=torch.float32)
    address, rate = bias.data_ptr(), np.float32(1e-3)
    update_bias(bias, np.array([5, 2, 3, 2], np.int64), 1e-3)  # mean 3
    expected = np.array([np.float32(0.3) - rate, np.float32(-1e-9) + rate, np.float32(0.3), np.float32(1) + rate])
    assert_same_bits(bias, torch.from_numpy(expected.astype(np.float32)), "bias")
    assert bias.data_ptr() == address


def test_the_mean_is_exact_beyond_fp64_integers():
    """2^60 counts that differ by one: only whole numbers see it."""
    bias = torch.zeros(2)
    update_bias(bias, np.array([2**60 + 1, 2**60], np.int64), 1.0)
    assert bias.tolist() == [-1.0, 1.0]
