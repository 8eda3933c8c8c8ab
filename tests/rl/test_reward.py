"""Reward functions: what they are given, what they may return, and how they are named and loaded."""

import asyncio
import math
import time

import numpy as np
import pytest
import torch

from zerogap.config import RewardConfig
from zerogap.errors import ConfigError
from zerogap.rl.data_rows import Row
from zerogap.rl.reward import FAILING_STEPS, RewardFunctions, load_rewards
from zerogap.rl.reward_builtin import number_match
from zerogap.rl.reward_values import RewardError

ROWS = [
    Row(f"file.jsonl:{i + 1}", ({"role": "user", "content": "same"},), {"answer": str(i), "tags": [i]})
    for i in range(3)
]
TEXTS = ["it is 0", "2", "so 2"]
IDS = [np.array([1, 2], np.int32), np.array([3], np.int32), np.array([], np.int32)]


def score(*functions, weights=None, rows=ROWS, abort=True):
    names = tuple(f.__name__ for f in functions)
    rewards = RewardFunctions(names, functions, tuple(weights or [1.0] * len(functions)), abort=abort)
    return rewards.score(rows, TEXTS, IDS, step=7)


def loaded(*functions, tasks=None, **section):
    return load_rewards(RewardConfig(functions=list(functions), **section), tasks)


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

    with pytest.raises(RewardError, match="reward function broken = \"KeyError: 'colour'\"") as error:
        score(broken)
    assert isinstance(error.value.__cause__, KeyError)
    assert "test_reward.py:" in error.value.mend, "the line that raised"


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


@pytest.mark.parametrize("timeout", [None, 60.0])
def test_loading(tmp_path, timeout):
    file = tmp_path / "my_reward.py"
    file.write_text("def f(completions, **kwargs):\n    return [0.5 for _ in completions]\nx = 3\n")
    (tmp_path / "broken.py").write_text("def f(:\n")
    functions = [f"{file}:f", "number_match", "zerogap.rl.reward_builtin:last_number"]
    rewards = loaded(*functions, weights=[1.0, 2.0, 3.0], timeout=timeout)
    assert rewards.names == ("f", "number_match", "last_number") and rewards.weights == (1.0, 2.0, 3.0)
    assert loaded(f"{file}:f", timeout=timeout).score(ROWS, TEXTS, IDS, 0).totals == [0.5] * 3
    for wrong, words in [
        ("f", "module:function"),
        ("no_such_module:f", "no_such_module"),
        (f"{tmp_path}/absent.py:f", "no such file"),
        (f"{tmp_path}/broken.py:f", "SyntaxError"),
        (f"{file}:g", "no function g"),
        (f"{file}:x", "no function x"),
        ("task", "scorer"),
        ("verl:f", "module:function"),
        ("verl:zerogap.rl.reward_builtin:last_number", "'text': verl's functions are given data_source"),
        ({"function": f"{file}:f", "name": "a", "positional": 3}, None),
        ({"function": "length", "size": 3}, "unexpected keyword argument 'size'"),
        ({"function": "length"}, "give both in tokens"),
        ({"function": "length", "short": 5, "long": 5}, "0 <= short < long"),
        ({"function": "format", "tags": ["a b"]}, "different words"),
        ({"function": "format", "tags": ["a", "a"]}, "different words"),
        ({"function": "format", "pattern": "("}, "no regular expression"),
    ]:
        if words is None:
            assert loaded(wrong, timeout=timeout).names == ("a",)
            continue
        with pytest.raises(ConfigError, match=words):
            loaded(wrong, timeout=timeout)
    with pytest.raises(ConfigError, match="once"):
        loaded("number_match", "number_match")


def test_functions_of_one_name_are_told_apart(tmp_path):
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("def f(completions): return [1.0] * len(completions)\n")
    functions = [f"{tmp_path}/a.py:f", f"{tmp_path}/b.py:f", {"function": "number_match", "name": "f"}]
    names = loaded(*functions, timeout=None).names
    assert len(set(names)) == 3 and not any("/" in name for name in names)
    lengths = [{"function": "length", "name": f"to_{n}", "short": 0, "long": n} for n in (10, 20)]
    rewards = loaded(*lengths)
    assert rewards.names == ("to_10", "to_20")
    assert rewards.score(ROWS, TEXTS, IDS, 0).columns == [[-0.2, -0.1, 0.0], [-0.1, -0.05, 0.0]]


def test_arguments_of_the_recipe_reach_the_function(tmp_path):
    file = tmp_path / "more.py"
    file.write_text(
        "def f(completions, size, colour='red'): return [float(size + (colour == 'blue'))] * len(completions)\n"
    )
    rewards = loaded({"function": f"{file}:f", "size": 3, "colour": "blue"})
    rewards.check(["answer"])
    assert rewards.score(ROWS, TEXTS, IDS, 0).totals == [4.0] * 3
    with pytest.raises(ConfigError, match="'size': it needs an argument"):
        loaded(f"{file}:f").check(["answer"])
    with pytest.raises(ConfigError, match="'size': choose another name"):
        rewards.check(["answer", "size"])


def test_a_function_scores_the_rows_of_its_data_sets():
    rows = [Row(f"r{i}", ROWS[0].prompt, {"answer": str(i)}, source) for i, source in enumerate("aba")]
    rewards = loaded({"function": "number_match", "sources": "a"}, {"function": "length", "short": 0, "long": 4})
    result = rewards.score(rows, TEXTS, IDS, 0)
    assert result.columns == [[1.0, None, 1.0], [-0.5, -0.25, 0.0]]
    assert result.totals == [0.5, -0.25, 1.0]
    rewards.check_rows([Row("b", (), {"answer": "yes"}, "b")])
    with pytest.raises(ConfigError, match=r"bad answer = 'yes': number_match needs a number"):
        rewards.check_rows([Row("fine", (), {"answer": 0}, "a"), Row("bad", (), {"answer": "yes"}, "a")])
    assert rewards.score(rows[1:2], ["2"], [[1]], 0).columns == [[None], [-0.25]], "not called for no row"


def test_faults_can_be_let_pass_and_are_counted():
    def partly(**kwargs):
        return [1.0, math.nan, "x"]

    def broken(**kwargs):
        raise ValueError("no")

    def short(**kwargs):
        return [1.0]

    async def later(**kwargs):
        raise ValueError("later")

    result = score(partly, broken, short, later, number_match, abort=False)
    none = [None] * 3
    assert result.columns == [[1.0, None, None], none, none, none, [1.0, 0.0, 1.0]]
    assert (result.errors, result.timeouts) == (2 + 3 + 3 + 3, 0)
    assert result.totals == [2.0, 0.0, 1.0]
    assert all(word in note for word, note in zip(("nan", "str", "no", "1 values", "later"), result.notes, strict=True))


def test_a_function_that_always_fails_ends_the_run_though_faults_are_let_pass():
    answers = [ValueError("no")] * (FAILING_STEPS - 1) + [[0.0] * 3] + [ValueError("no")] * FAILING_STEPS

    def moody(**kwargs):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    rewards = RewardFunctions(("moody", "number_match"), (moody, number_match), (1.0, 1.0), abort=False)
    for _ in range(2 * FAILING_STEPS - 1):
        assert rewards.score(ROWS, TEXTS, IDS, 0).totals == [1.0, 0.0, 1.0]
    with pytest.raises(RewardError, match=rf"moody = 'ValueError: no'.*{FAILING_STEPS} times in a row"):
        rewards.score(ROWS, TEXTS, IDS, 0)
