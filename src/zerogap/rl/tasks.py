"""Tasks that make their own problems: two small ones for a quick start, and those of reasoning-gym.

A task gives items to train on and items held out. No held-out problem is ever trained on, in any order of its numbers.
The built-in tasks are fixed: the same problems in every run, so that accuracies of different runs compare.
"""

import dataclasses
import importlib.util
import itertools
import random
import re
from collections.abc import Callable, Mapping
from typing import Any

from zerogap.errors import ConfigError

Item = dict[str, Any]

HELD_OUT_MULTIPLICATIONS = 24
HELD_OUT_TRIPLES = 64
TRAINED_TRIPLES = 1024


def multiplication() -> tuple[list[Item], list[Item]]:
    """One-digit products: 76 of the 100 ordered pairs to train on, 24 held out.

    Held out are 11 pairs of different digits in both orders and 2 squares, drawn once with a fixed seed.
    """
    chosen = random.Random(2026)
    squares = chosen.sample(range(10), 2)
    mixed = chosen.sample(list(itertools.combinations(range(10), 2)), 11)
    held = {(a, a) for a in squares} | set(mixed) | {(b, a) for a, b in mixed}
    assert len(held) == HELD_OUT_MULTIPLICATIONS, "two squares and eleven pairs in both orders"

    def item(a: int, b: int) -> Item:
        return {"prompt": f"What is {a} times {b}? Reply with the number only.", "answer": str(a * b)}

    pairs = list(itertools.product(range(10), repeat=2))
    return [item(*p) for p in pairs if p not in held], [item(*p) for p in pairs if p in held]


def largest_of_three() -> tuple[list[Item], list[Item]]:
    """Which of three different numbers from 10 to 99 is the largest: 1,024 sets to train on, 64 other sets held out."""
    chosen = random.Random(2026)
    sets: dict[tuple[int, ...], tuple[int, ...]] = {}
    while len(sets) < TRAINED_TRIPLES + HELD_OUT_TRIPLES:
        numbers = tuple(chosen.sample(range(10, 100), 3))
        sets.setdefault(tuple(sorted(numbers)), numbers)
    items = [
        {
            "prompt": f"Which number is the largest: {a}, {b} or {c}? Reply with the number only.",
            "answer": str(max(a, b, c)),
        }
        for a, b, c in sets.values()
    ]
    return items[HELD_OUT_TRIPLES:], items[:HELD_OUT_TRIPLES]


BUILT_IN: dict[str, Callable[[], tuple[list[Item], list[Item]]]] = {
    "multiplication": multiplication,
    "largest_of_three": largest_of_three,
}


@dataclasses.dataclass(frozen=True)
class GymTask:
    """A reasoning-gym task with its settings; it makes problems, and scores completions of them.

    Attributes:
        name: as reasoning-gym knows it.
        size: problems drawn, held-out ones included.
        seed: of the problems.
        settings: as that task names them.
    """

    name: str
    size: int
    seed: int
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def problems(self, key: str = "data.train") -> tuple[list[Item], list[Item]]:
        """Problems to train on, and held out ones.

        A fifth of `size`, at most 200, is held out; problems to train on that equal a held-out one are left out.

        Raises:
            ConfigError: reasoning-gym is not installed, or refuses the name or the settings.
        """
        task = self._open(key)
        try:
            entries = [task[i] for i in range(self.size)]
        except REFUSALS as error:
            raise self._refused(key, error) from error
        items = [{"prompt": e["question"], "answer": e["answer"], "entry": e} for e in entries]
        held_out = items[: min(200, self.size // 5)]
        asked = {item["prompt"] for item in held_out}
        train = [item for item in items[len(held_out) :] if item["prompt"] not in asked]
        if not train:
            raise ConfigError(
                "data.size", self.size, "raise it: no problem is left to train on beside the held-out ones"
            )
        return train, held_out

    def scorer(self) -> Callable[[str, Mapping[str, Any]], float]:
        """(completion, a problem's `entry`) -> the task's own score of what stands between <answer> and </answer>, or
        of the whole completion."""
        task = self._open("data.train")

        def score(text: str, entry: Mapping[str, Any]) -> float:
            tagged = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
            return float(task.score_answer(answer=(tagged[-1] if tagged else text).strip(), entry=dict(entry)))

        return score

    def _open(self, key: str) -> Any:
        if importlib.util.find_spec("reasoning_gym") is None:
            raise ConfigError(key, f"reasoning_gym:{self.name}", "install it: pip install 'zerogap[tasks]'")
        import reasoning_gym as gym

        try:
            return gym.create_dataset(self.name, **{"size": self.size, "seed": self.seed, **self.settings})
        except REFUSALS as error:
            raise self._refused(key, error) from error

    def _refused(self, key: str, error: Exception) -> ConfigError:
        return ConfigError(key, f"reasoning_gym:{self.name}", f"reasoning-gym refuses: {error}")


REFUSALS = (ValueError, TypeError, AssertionError, KeyError)
