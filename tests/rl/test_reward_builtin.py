"""Built-in rewards: numbers, mathematics, form, length, and the scorers of tasks."""

import importlib.util
import math
from fractions import Fraction

import pytest

from zerogap.config import RewardConfig
from zerogap.errors import ConfigError
from zerogap.rl.data_rows import Row
from zerogap.rl.reward import RewardFunctions, load_rewards
from zerogap.rl.reward_builtin import (
    format_reward,
    last_number,
    length_reward,
    math_verify,
    number_match,
    reference_number,
)
from zerogap.rl.reward_loading import FunctionSpec
from zerogap.rl.reward_process import IsolatedFunction
from zerogap.rl.reward_values import RewardError
from zerogap.rl.tasks import GymTask


def texts(*contents):
    return [[{"role": "assistant", "content": c}] for c in contents]


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
    assert number_match(texts("18", "18.00", "1,8", "it", "1e3"), ["18", 18, 18.0, "18", "1000"]) == [1, 1, 0, 0, 0]
    with pytest.raises(ConfigError, match="needs a number"):
        number_match(texts("1"), ["yes"])


GOOD = "<think>a\n</think>\n<answer>4</answer>"


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (GOOD, 1.0),
        (f" {GOOD}\n", 1.0),
        ("<think></think><answer></answer>", 1.0),
        (f"{GOOD} more", 0.0),
        (f"so {GOOD}", 0.0),
        (GOOD.replace("\n<answer>", "\nhm <answer>"), 0.0),
        ("<answer>4</answer><think>a</think>", 0.0),
        ("<think>a<answer>4</answer></think>", 0.0),
        ("<think>a</think><think>b</think><answer>4</answer>", 0.0),
        ("<think>a</think><answer>4", 0.0),
        ("<think>a</think>", 0.0),
        ("", 0.0),
    ],
)
def test_form_by_tags(text, score):
    assert format_reward()(texts(text)) == [score]


def test_form_by_other_tags_and_by_a_pattern():
    assert format_reward(tags="answer")(texts("<answer>4</answer>", GOOD)) == [1.0, 0.0]
    assert format_reward(pattern=r"So:.*\d")(texts("So:\n 4", "So: 4.", "So so: 4")) == [1.0, 0.0, 0.0]


def test_length_falls_on_a_line():
    score = length_reward(short=2, long=6)
    assert score([[0] * n for n in (0, 2, 3, 4, 6, 9)]) == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    assert math.copysign(1, score([[]])[0]) == 1.0


mathematics = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None,
    reason="math-verify is an extra: pip install 'zerogap[math]'",
)


@mathematics
@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [
        ("The answer is \\boxed{\\frac{1}{2}}.", "0.5", 1.0),
        ("so $x = 2\\sqrt{3}$", "$\\sqrt{12}$", 1.0),
        ("It is 18", "48/2 = <<48/2=24>>24\n#### 18", 1.0),
        ("It is 19", "48/2 = <<48/2=24>>24\n#### 18", 0.0),
        ("\\boxed{72}", 72, 1.0),
        ("no idea", "3", 0.0),
        ("", "3", 0.0),
    ],
)
def test_mathematics_is_compared_by_value(text, answer, score):
    assert math_verify()(texts(text), [answer]) == [score]


@mathematics
def test_an_answer_that_is_no_mathematics_is_named():
    with pytest.raises(ConfigError, match="answer = '': math_verify finds no mathematics"):
        math_verify()(texts("3"), [""])


@mathematics
def test_mathematics_without_an_end_is_ended_and_counts_as_wrong():
    """sympy works for ever on a tower of powers; the rows after it are scored, in a process that begins anew."""
    rows = [Row(f"f:{i}", (), {"answer": "3"}) for i in range(3)]
    function = IsolatedFunction(FunctionSpec("math_verify", name="math_verify", cpu_seconds=1.0), 600.0)
    rewards = RewardFunctions(("math_verify",), (function,), (1.0,))
    result = rewards.score(rows, ["\\boxed{3}", "$10^{10^{10}}$", "it is 3.0"], [[]] * 3, 0)
    assert result.totals == [1.0, 0.0, 1.0]
    assert (result.timeouts, result.errors, result.notes) == (1, 0, ())
    with pytest.raises(RewardError, match=r"answer, row bad:7 = ' ': math_verify finds no mathematics"):
        rewards.score([Row("bad:7", (), {"answer": " "})], ["3"], [[]], 0)


def test_a_task_scores_in_a_process_of_its_own():
    task = GymTask("chain_sum", 8, 1)
    items, _ = task.problems()
    rows = [Row(str(i), (), {"answer": x["answer"], "entry": x["entry"], "task": "t"}) for i, x in enumerate(items[:2])]
    rows.append(Row("other", (), {"answer": "1"}))
    rewards = load_rewards(RewardConfig(functions="task"), {"t": task})
    rewards.check(["answer", "entry", "task"])
    answers = [rows[0].columns["answer"], "no", "1"]
    result = rewards.score(rows, answers, [[]] * 3, 0)
    assert result.totals[0] == 1.0 and result.totals[1] < 1.0 and result.totals[2] is None
