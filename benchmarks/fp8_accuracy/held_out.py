"""The held-out prompts: 1,008 of two kinds, none of which any run trains on.

- *products*: the 24 one-digit products that the quick-start task holds out, each asked in 21 ways (504 prompts). The
  first way is the one that runs are trained in; the other 20 are new. Products and ways are crossed, so this part says
  what was learnt about 24 products, not about 504.
- *two-digit*: 504 products of a number from 10 to 99 and one from 2 to 9, drawn once with a fixed seed and asked in the
  trained way (504 prompts): farther from what is trained, and each prompt a product of its own.

Trained on are the other 76 one-digit products, in the first way alone.
"""

import dataclasses
import hashlib
import itertools
import json
import random
import re

from zerogap.rl import tasks

TEMPLATES = (
    "What is {a} times {b}? Reply with the number only.",
    "What is {a} multiplied by {b}? Reply with the number only.",
    "Multiply {a} by {b}. Reply with the number only.",
    "Compute {a} x {b}. Reply with the number only.",
    "Calculate {a} times {b}. Reply with the number only.",
    "Work out {a} times {b}. Reply with the number only.",
    "{a} * {b} = ? Reply with the number only.",
    "{a} times {b} equals what? Reply with the number only.",
    "Find the product of {a} and {b}. Reply with the number only.",
    "What is the product of {a} and {b}? Reply with the number only.",
    "Calculate the product of {a} and {b}. Answer with the number only.",
    "Please multiply {a} and {b}. Answer with the number only.",
    "How much is {a} times {b}? Answer with the number only.",
    "Tell me what {a} times {b} is. Answer with the number only.",
    "Solve {a} x {b}. Answer with the number only.",
    "How much is {a} times {b}? Give only the number.",
    "What does {a} times {b} make? Give only the number.",
    "Give the result of {a} multiplied by {b}. Only the number.",
    "What do you get when you multiply {a} by {b}? Only the number.",
    "A box holds {a} rows of {b} eggs. How many eggs is that? Reply with the number only.",
    "There are {a} bags with {b} apples each. How many apples are there? Reply with the number only.",
)
TWO_DIGIT = 504
PARTS = ("products", "two-digit")
TEXT = (
    "1,008 prompts: the 24 held-out one-digit products in 21 wordings (1 of them trained), and 504 products of a "
    "two-digit and a one-digit number in the trained wording"
)


@dataclasses.dataclass(frozen=True)
class HeldOutPrompt:
    """A prompt with its answer and the part (`PARTS`) that it belongs to."""

    part: str
    prompt: str
    answer: str


def held_out_prompts() -> tuple[HeldOutPrompt, ...]:
    """All of them, in a fixed order; no two are equal, and none is among the task's prompts to train on."""
    trained, held = tasks.multiplication()
    pairs = [_factors(item["prompt"]) for item in held]
    prompts = [_ask("products", template, *pair) for template in TEMPLATES for pair in pairs]
    chosen = random.Random(2026).sample(list(itertools.product(range(10, 100), range(2, 10))), TWO_DIGIT)
    prompts += [_ask("two-digit", TEMPLATES[0], *pair) for pair in sorted(chosen)]
    texts = {prompt.prompt for prompt in prompts}
    assert len(texts) == len(prompts), "held-out prompts differ from each other"
    assert not texts & {item["prompt"] for item in trained}, "no held-out prompt is trained on"
    return tuple(prompts)


def digest(prompts: tuple[HeldOutPrompt, ...]) -> str:
    """16 hex digits over prompts and answers."""
    text = json.dumps([dataclasses.astuple(prompt) for prompt in prompts])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _factors(prompt: str) -> tuple[int, int]:
    first, second = re.findall(r"\d+", prompt)
    return int(first), int(second)


def _ask(part: str, template: str, a: int, b: int) -> HeldOutPrompt:
    return HeldOutPrompt(part, template.format(a=a, b=b), str(a * b))
