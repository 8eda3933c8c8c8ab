"""Built-in rewards: numbers, mathematical equality, form, length, and the scorers of reasoning-gym tasks.

Each is made by a function of its settings and has TRL's signature, like a user's own. Nothing here bounds its time:
sympy, behind `math_verify` and many tasks, can work for ever on `10^{10^{10}}`, so those run in a process that is ended
(`reward_process`); their own time limits use signals, which other threads do not have, and stay off.
"""

import importlib.util
import math
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from zerogap.errors import ConfigError
from zerogap.rl.tasks import GymTask

Reward = Callable[..., Any]

_NUMBER = re.compile(r"(?<![0-9])-?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)?(?:\.[0-9]+)?")
MATHEMATICS = ("$", "\\boxed", "\\(", "\\[")  # marks of an answer that says itself where its formula is


def _texts(completions: Sequence[Any]) -> list[str]:
    return [messages[0]["content"] for messages in completions]


# ---------------------------------------------------------------------------------------------------- numbers


def last_number(text: str) -> Fraction | None:
    """The last number in a text, exactly: `1,234.50`, `-3`, `.5`; a minus right after a digit is an operator."""
    found = [m.group() for m in _NUMBER.finditer(text.replace("\N{MINUS SIGN}", "-")) if m.group().strip("-")]
    return Fraction(found[-1].replace(",", "")) if found else None


def reference_number(answer: object) -> Fraction | None:
    """The number that an answer column states: a number, or a text's last one (GSM8K: the one after `####`)."""
    if isinstance(answer, int | float) and not isinstance(answer, bool) and math.isfinite(answer):
        return Fraction(repr(answer))
    return last_number(answer.rpartition("####")[2]) if isinstance(answer, str) else None


def number_match(completions: list, answer: list) -> list[float]:
    """1.0 where the last number of a completion equals the answer's, else 0.0."""
    scores = []
    for text, expected in zip(_texts(completions), answer, strict=True):
        number = reference_number(expected)
        if number is None:
            raise ConfigError("answer", expected, "number_match needs a number in the answer")
        scores.append(float(last_number(text) == number))
    return scores


def math_verify() -> Reward:
    """1.0 where a completion's mathematical answer equals the row's, by the math-verify library, else 0.0.

    An answer without marks of mathematics is taken as a formula; of a GSM8K solution what follows `####`.

    Raises:
        ConfigError: the library is not installed; in a call: the row's answer is no mathematics.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError("reward.functions", "math_verify", "it needs math-verify: pip install 'zerogap[math]'")
    from math_verify import parse, verify

    def math_verify(completions: list, answer: list) -> list[float]:
        scores = []
        for text, expected in zip(_texts(completions), answer, strict=True):
            gold = str(expected).rpartition("####")[2].strip()
            if not any(mark in gold for mark in MATHEMATICS):
                gold = f"\\boxed{{{gold}}}"
            wanted = parse(gold, parsing_timeout=None)
            if not wanted:
                raise ConfigError("answer", expected, "math_verify finds no mathematics in the answer")
            scores.append(float(verify(wanted, parse(text, parsing_timeout=None), timeout_seconds=None)))
        return scores

    return math_verify


# ---------------------------------------------------------------------------------------------------- form, length


def format_reward(tags: Sequence[str] = ("think", "answer"), pattern: str | None = None) -> Reward:
    """1.0 where a completion has the asked form, else 0.0.

    Args:
        tags: it consists of <a>...</a> for each tag, in this order and each mark once, with nothing but blanks between.
        pattern: instead, a regular expression that the whole completion matches (`.` matches line ends, too).

    Raises:
        ConfigError: no tag, a tag that is no word, or a pattern that is no regular expression.
    """
    if isinstance(tags, str):
        tags = [tags]
    if not tags or len(set(tags)) != len(tags) or not all(re.fullmatch(r"[\w-]+", str(tag)) for tag in tags):
        raise ConfigError("reward.functions", f"format, tags {list(tags)}", "give different words, such as [think]")
    if pattern is not None:
        try:
            whole = re.compile(pattern, re.DOTALL)
        except re.error as error:
            mend = f"it is no regular expression: {error}"
            raise ConfigError("reward.functions", f"format, pattern {pattern}", mend) from None

        def has_form(text: str) -> bool:
            return whole.fullmatch(text) is not None

    else:

        def has_form(text: str) -> bool:
            return has_tags(text, tags)

    def format(completions: list) -> list[float]:
        return [float(has_form(text)) for text in _texts(completions)]

    return format


def has_tags(text: str, tags: Sequence[str]) -> bool:
    """Whether the text is `<a>...</a> <b>...</b>`: every mark once, in order, and only blanks outside."""
    marks = [f"<{slash}{tag}>" for tag in tags for slash in ("", "/")]
    if any(text.count(mark) != 1 for mark in marks):
        return False
    places = [text.index(mark) for mark in marks]
    if places != sorted(places):
        return False
    outside = [text[: places[0]], text[places[-1] + len(marks[-1]) :]]
    for closing in range(1, len(marks) - 1, 2):
        outside.append(text[places[closing] + len(marks[closing]) : places[closing + 1]])
    return not any(part.strip() for part in outside)


def length_reward(short: int | None = None, long: int | None = None) -> Reward:
    """0.0 for completions of up to `short` tokens, -1.0 from `long` tokens on, on a line between them.

    With `short` = L_max - L_cache and `long` = L_max this is the soft overlong punishment of DAPO (Yu et al. 2025,
    "DAPO", equation 13).

    Raises:
        ConfigError: not two lengths with 0 <= short < long.
    """
    given = (short, long)
    if not all(isinstance(n, int) and not isinstance(n, bool) for n in given):
        raise ConfigError("reward.functions", f"length, short {short}, long {long}", "give both in tokens")
    assert short is not None and long is not None, "checked"
    if not 0 <= short < long:
        raise ConfigError("reward.functions", f"length, short {short}, long {long}", "give 0 <= short < long")

    def length(completion_ids: list) -> list[float]:
        return [0.0 - min(1.0, max(0.0, (len(ids) - short) / (long - short))) for ids in completion_ids]

    return length


# ---------------------------------------------------------------------------------------------------- tasks


def task_reward(tasks: Mapping[str, GymTask]) -> Reward:
    """What a reasoning-gym task itself says of a completion; None for rows of other data sets.

    Args:
        tasks: by the value of the column `task`.
    """
    scorers = {label: task.scorer() for label, task in tasks.items()}

    def task(completions: list, entry: list, task: list) -> list[float | None]:
        rows = zip(_texts(completions), entry, task, strict=True)
        return [None if e is None else scorers[label](text, e) for text, e, label in rows]

    return task
