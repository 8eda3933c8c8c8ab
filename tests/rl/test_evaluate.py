"""Held-out figures."""

import itertools
import math
from fractions import Fraction

import pytest

from zerogap.config import load_config
from zerogap.errors import ConfigError
from zerogap.rl.evaluate import majority, pass_at_k, summarise, vote_of


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


def test_more_than_the_samples_is_refused_in_a_recipe():
    tree = {"model": "m", "data": {"train": "multiplication"}, "optimizer": {"max_steps": 1}}
    with pytest.raises(ConfigError, match=r"eval\.pass_k = \[1, 5\]: choose at most num_samples \(4\)"):
        load_config(tree, ["eval.num_samples=4", "eval.temperature=1.0", "eval.pass_k=[1, 5]"])


@pytest.mark.parametrize(
    ("text", "vote"),
    [
        ("so 7 x 8 = 56.", 56),
        ("it is 1,234.50", Fraction("1234.5")),
        ("\\boxed{3} no, \\boxed{\\frac{1}{2}} then 9", "\\frac{1}{2}"),
        ("\\boxed{ -1,200.0 }", -1200),
        ("\\boxed{ Paris } or 3", "Paris"),
        ("\\boxed{x", "x"),
        ("  The  Answer\n", "the answer"),
        ("", None),
        (" \n", None),
    ],
)
def test_an_answer_is_one_vote_however_it_is_written(text, vote):
    assert vote_of(text) == vote


def test_the_majority_is_what_most_completions_answer():
    assert majority([1, 1, 2], [True, True, False]) == 1.0
    assert majority([2, 1, 2], [False, True, False]) == 0.0
    assert majority([1, 2], [True, False]) == majority([2, 1], [False, True]) == 0.5, "a tie has no order"
    assert majority([None, None, 1], [False, False, True]) == 1.0, "no answer is no vote"
    assert majority([None], [False]) == 0.0
    assert majority([1, 1, 2], [True, False, True]) == 0.5, "one answer, scored unlike"
    assert majority([1, 1, 2, 2, 3], [True, False, False, False, True]) == 0.25


def test_maj_at_n_beside_the_others():
    scores = [[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]]
    result = summarise(scores, votes=[[5, 5, 6], [7, 8, 8]])
    assert (result["eval/maj@3"], result["eval/mean@3"], result["eval/pass@1"]) == (0.5, 0.5, 0.5)
    assert "eval/maj@3" not in summarise(scores)
