"""Held-out figures."""

import itertools
import math

import pytest

from zerogap.errors import ConfigError
from zerogap.rl.evaluate import pass_at_k, summarise


def test_pass_at_k_counts_subsets():
    for n in range(1, 7):
        for c in range(n + 1):
            for k in range(1, n + 1):
                draws = list(itertools.combinations(range(n), k))
                assert math.isclose(pass_at_k(n, c, k), sum(min(d) < c for d in draws) / len(draws)), (n, c, k)


def test_pass_at_k_edges():
    assert pass_at_k(4, 1, 4) == 1.0
    assert pass_at_k(4, 0, 4) == 0.0
    with pytest.raises(ConfigError, match="from 1 to the 3 samples"):
        pass_at_k(3, 1, 4)
    with pytest.raises(ConfigError):
        pass_at_k(3, 1, 0)


def test_summary():
    result = summarise([[1.0, 0.0], [1.0, 1.0], [None, 0.5]], pass_k=(1, 2))
    assert result == {
        "eval/accuracy": 0.5,
        "eval/mean@2": 3.5 / 6,
        "eval/pass@1": 0.5,
        "eval/pass@2": 2 / 3,
        "eval/num_prompts": 3.0,
    }
    assert summarise([[0.5]], threshold=0.5)["eval/accuracy"] == 1.0
    for wrong in ([], [[]], [[1.0], [1.0, 0.0]]):
        with pytest.raises(ConfigError):
            summarise(wrong)
    with pytest.raises(ConfigError, match="samples per prompt"):
        summarise([[1.0]], pass_k=(2,))
