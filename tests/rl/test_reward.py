"""Reward functions: what they are given, what they may return, and the built-in number match."""

import asyncio
import math
import time
from fractions import Fraction

import numpy as np
import pytest
import torch

from zerogap.errors import ConfigError
from zerogap.rl.data import Row
from zerogap.rl.reward import RewardFunctions, last_number, load_rewards, number_match, reference_number

ROWS = [
    Row(f"file.jsonl:{i + 1}", ({"role": "user", "content": "same"},), {"answer": str(i), "tags": [i]})
    for i in range(3)
]
TEXTS = ["it is 0", "2", "so 2"]
IDS = [np.array([1, 2], np.int32), np.array([3], np.int32), np.array([], np.int32)]


def score(*functions, weights=None, rows=ROWS):
    names = tuple(f.__name__ for f in functions)
    rewards = RewardFunctions(names, functions, tuple(weights or [1.0] * len(functions)))
    return rewards.score(rows, TEXTS, IDS, step=7)


def returning(value):
    def fixed(**kwargs):
        return value

    return fixed


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([1.0, 2.0], ["2 values", "return 3"]),
        ([1.0] * 4, ["4 values", "return 3"]),
        ([], ["0 values", "return 3"]),
        (1.0, ["float", "return a list"]),
        (None, ["NoneType", "return a list"]),
        ("abc", ["str", "return a list"]),
        (np.ones(3), ["ndarray", ".tolist()"]),
        (torch.ones(3), ["Tensor", ".tolist()"]),
        ([1.0, math.nan, 0.0], ["completion 1 (file.jsonl:2)", "nan", "finite"]),
        ([1.0, 0.0, -math.inf], ["completion 2 (file.jsonl:3)", "-inf", "finite"]),
        ([1.0, "1", 0.0], ["completion 1 (file.jsonl:2)", "not str"]),
        ([[1.0], 0.0, 0.0], ["completion 0 (file.jsonl:1)", "not list"]),
        ([torch.tensor(1.0), 0.0, 0.0], ["completion 0", "not Tensor"]),
        ([1j, 0.0, 0.0], ["completion 0", "not complex"]),
    ],
)
def test_wrong_results_are_refused_by_function_and_row(value, words):
    with pytest.raises(ConfigError) as error:
        score(returning(value))
    assert not [w for w in ["reward function fixed", *words] if w not in str(error.value)], str(error.value)


@pytest.mark.parametrize(
    ("value", "totals"),
    [
        ([0.0, None, 1], [0.0, None, 1.0]),
        ([True, False, np.bool_(True)], [1.0, 0.0, 1.0]),
        ((np.float32(0.5), np.float64(0.25), np.int64(3)), [0.5, 0.25, 3.0]),
        ([None] * 3, [None] * 3),
    ],
)
def test_results_that_are_accepted(value, totals):
    result = score(returning(value))
    assert result.totals == totals
    assert all(t is None or type(t) is float for t in result.totals)


def test_weights_and_none():
    def a(completions):
        return [1.0, None, None]

    def b(completions):
        return [0.5, 0.0, None]

    result = score(a, b, weights=[2.0, 10.0])
    assert result.totals == [7.0, 0.0, None]
    assert result.columns == [[1.0, None, None], [0.5, 0.0, None]]


def test_arguments_are_those_of_trl():
    seen = {}

    def collect(**kwargs):
        seen.update(kwargs)
        kwargs["log_extra"]("length", [1, 2, 3])
        kwargs["log_metric"]("m", 1.0)
        kwargs["log_metric"]("m", 2.0)
        return [0.0] * 3

    result = score(collect)
    assert set(seen) == {
        "prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "answer", "tags",
    }  # fmt: skip
    assert seen["prompts"] == [[{"role": "user", "content": "same"}]] * 3
    assert seen["completions"][2] == [{"role": "assistant", "content": "so 2"}]
    assert seen["completion_ids"] == [[1, 2], [3], []]
    assert seen["answer"] == ["0", "1", "2"] and seen["trainer_state"].global_step == 7
    assert result.extra == {"length": [1, 2, 3]} and result.metrics == {"m": 1.5}


def test_mutation_is_seen_by_nobody():
    def vandal(prompts, completions, completion_ids, tags, answer):
        prompts[0][0]["content"] = completions[0][0]["content"] = "gone"
        completion_ids.clear()
        tags[0].append(99)
        answer.reverse()
        return [0.0] * 3

    def check(prompts, completions, completion_ids, tags, answer):
        assert (prompts[0][0]["content"], completions[0][0]["content"]) == ("same", "it is 0")
        assert completion_ids == [[1, 2], [3], []] and tags == [[0], [1], [2]] and answer == ["0", "1", "2"]
        return [1.0] * 3

    assert score(vandal, check).totals == [1.0] * 3
    assert ROWS[0].columns["tags"] == [0] and ROWS[0].prompt[0]["content"] == "same"


def test_duplicate_prompts_keep_their_own_answers():
    assert score(number_match).totals == [1.0, 0.0, 1.0]


def test_a_function_may_print_and_take_its_time(capsys):
    def slow(completions):
        time.sleep(0.02)
        print("scored", len(completions))
        return [0.0] * 3

    assert score(slow).totals == [0.0] * 3
    assert capsys.readouterr().out == "scored 3\n"


def test_a_function_that_raises_is_named():
    def broken(**kwargs):
        raise KeyError("colour")

    with pytest.raises(ConfigError, match="reward function broken = \"KeyError: 'colour'\"") as error:
        score(broken)
    assert isinstance(error.value.__cause__, KeyError)


def test_async_functions_run_together_also_inside_an_event_loop():
    started = []

    def waiting(name, number):
        async def function(**kwargs):
            started.append(name)
            while len(started) < 2:  # ends only if both run at once
                await asyncio.sleep(0)
            return [number] * 3

        function.__name__ = name
        return function

    async def inside():
        return score(waiting("a", 1.0), waiting("b", 2.0))

    assert score(waiting("a", 1.0), waiting("b", 2.0)).totals == [3.0] * 3
    started.clear()
    assert asyncio.run(inside()).columns == [[1.0] * 3, [2.0] * 3]

    async def broken(**kwargs):
        raise ValueError("no")

    with pytest.raises(ConfigError, match="reward function broken"):
        score(broken)


def test_missing_arguments_are_found_before_the_run():
    def needs(completions, colour, size=1):
        return []

    rewards = RewardFunctions(("needs",), (needs,), (1.0,))
    with pytest.raises(ConfigError, match="'colour'"):
        rewards.check(["answer"])
    rewards.check(["colour"])
    RewardFunctions(("number_match",), (number_match,), (1.0,)).check(["answer"])


def test_loading(tmp_path):
    file = tmp_path / "my_reward.py"
    file.write_text("def f(completions, **kwargs):\n    return [0.5 for _ in completions]\nx = 3\n")
    rewards = load_rewards([f"{file}:f", "number_match", "zerogap.rl.reward:last_number"], [1.0, 2.0, 3.0])
    assert rewards.names == ("f", "number_match", "last_number") and rewards.weights == (1.0, 2.0, 3.0)
    assert load_rewards([f"{file}:f"], None).score(ROWS, TEXTS, IDS, 0).totals == [0.5] * 3
    for wrong, words in [
        ("f", "module:function"),
        ("no_such_module:f", "no_such_module"),
        (f"{tmp_path}/absent.py:f", "no such file"),
        (f"{file}:g", "no function g"),
        (f"{file}:x", "no function x"),
        ("task", "scorer"),
    ]:
        with pytest.raises(ConfigError, match=words):
            load_rewards([wrong], None)
    with pytest.raises(ConfigError, match="once"):
        load_rewards(["number_match", "number_match"], None)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7 times 8 is 56.", 56),
        ("56", 56),
        ("-3", -3),
        ("\N{MINUS SIGN}3", -3),
        ("10-3", 3),
        ("10 - 3", 3),
        ("$1,234.50", Fraction(2469, 2)),
        ("1,2,3", 3),
        ("1,2345", 2345),
        ("it is .5", Fraction(1, 2)),
        ("v3.14", Fraction(157, 50)),
        ("a-b", None),
        ("", None),
        ("\u0665", None),
        ("**42**", 42),
        ("007", 7),
    ],
)
def test_last_number(text, number):
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("48/2 = <<48/2=24>>24 clips\n#### 1,072", 1072),
        (18, 18),
        (0.1, Fraction(1, 10)),
        ("18.0", 18),
        ("none", None),
        (None, None),
        (True, None),
        (math.nan, None),
    ],
)
def test_reference_number(answer, number):
    assert reference_number(answer) == number


def test_number_match_compares_values():
    def texts(*contents):
        return [[{"role": "assistant", "content": c}] for c in contents]

    assert number_match(texts("18", "18.00", "1,8", "it", "1e3"), ["18", 18, 18.0, "18", "1000"]) == [1, 1, 0, 0, 0]
    with pytest.raises(ConfigError, match="needs a number"):
        number_match(texts("1"), ["yes"])
