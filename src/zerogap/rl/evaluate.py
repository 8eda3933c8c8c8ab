"""What a held-out evaluation reports, from scores and texts alone; `rl/held_out.py` generates the completions."""

import math
import re
from collections import Counter
from collections.abc import Hashable, Sequence
from fractions import Fraction

from zerogap.errors import ConfigError
from zerogap.rl.reward_builtin import last_number

BOXED = "\\boxed{"
PLAIN_NUMBER = re.compile(r"[-\N{MINUS SIGN}$]*[0-9][0-9,.]*")


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of k samples is correct.

    1 - C(n - c, k) / C(n, k) (Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1),
    computed exactly and rounded once.

    Raises:
        ConfigError: fewer samples than k.
    """
    assert 0 <= num_correct <= num_samples, f"{num_correct} correct of {num_samples}"
    if not 1 <= k <= num_samples:
        raise ConfigError("eval.pass_k", k, f"choose a number from 1 to the {num_samples} samples per prompt")
    return float(1 - Fraction(math.comb(num_samples - num_correct, k), math.comb(num_samples, k)))


def vote_of(text: str) -> Hashable:
    """The answer that a completion votes for; None where it says nothing.

    What the last `\\boxed{...}` holds, where there is one: as a number if it is nothing but one, else as it is written,
    without spaces. Else the last number of the text, exactly (`3.50` and `3.5` are one answer, as for `number_match`),
    else its words, lower case and single-spaced.
    """
    start = text.rfind(BOXED)
    if start >= 0:
        held = "".join(_closed(text[start + len(BOXED) :]).split())
        return last_number(held) if PLAIN_NUMBER.fullmatch(held) else held or None
    number = last_number(text)
    return number if number is not None else " ".join(text.lower().split()) or None


def _closed(text: str) -> str:
    """The text up to the brace that closes what was opened before it; all of it where none does."""
    depth = 1
    for i, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:i]
    return text


def majority(votes: Sequence[Hashable], correct: Sequence[bool]) -> float:
    """Chance that the answer with most votes is correct (maj@n; Wang et al. 2022, "Self-Consistency").

    Completions of one answer that are scored unlike (a format that counts, too) give the share that is correct; answers
    with equally many votes count alike, so the order of completions does not matter. Without a vote (None): 0.
    """
    counts = Counter(vote for vote in votes if vote is not None)
    if not counts:
        return 0.0
    most = max(counts.values())
    leading = {vote for vote, count in counts.items() if count == most}  # all of one size: the mean of means is plain
    right = sum(is_correct for vote, is_correct in zip(votes, correct, strict=True) if vote in leading)
    return right / (most * len(leading))


def is_correct(score: float | None, threshold: float = 1.0) -> bool:
    """A completion is correct if it has a reward and this is at least `threshold`."""
    return score is not None and score >= threshold


def summarise(
    scores: Sequence[Sequence[float | None]],
    pass_k: Sequence[int] = (1,),
    threshold: float = 1.0,
    votes: Sequence[Sequence[Hashable]] | None = None,
) -> dict[str, float]:
    """Figures over all held-out prompts.

    Args:
        scores: [prompts][n] rewards; None (no reward) counts as not correct and as 0 in the mean.
        pass_k: report pass@k for these k.
        threshold: a completion is correct if its reward is at least this.
        votes: [prompts][n] the answer of each completion (`vote_of`), for maj@n.

    Returns:
        `eval/accuracy` (share of correct completions), `eval/mean@n` (mean reward; n = completions per prompt),
        `eval/maj@n` where there are votes, `eval/pass@k`, `eval/num_prompts`.

    Raises:
        ConfigError: no prompts, unequal numbers of completions, or k larger than that number.
    """
    sizes = {len(row) for row in scores}
    if len(sizes) != 1 or 0 in sizes:
        raise ConfigError(
            "eval", sorted(sizes), "give every held-out prompt the same number of completions, at least 1"
        )
    (n,) = sizes
    numbers = [[0.0 if s is None else float(s) for s in row] for row in scores]
    correct = [[is_correct(s, threshold) for s in row] for row in scores]
    result = {
        "eval/accuracy": sum(map(sum, correct)) / (n * len(scores)),
        f"eval/mean@{n}": math.fsum(s for row in numbers for s in row) / (n * len(scores)),
    }
    if votes is not None:
        chances = [majority(row, right) for row, right in zip(votes, correct, strict=True)]
        result[f"eval/maj@{n}"] = math.fsum(chances) / len(scores)
    for k in pass_k:
        result[f"eval/pass@{k}"] = math.fsum(pass_at_k(n, sum(row), k) for row in correct) / len(scores)
    return result | {"eval/num_prompts": float(len(scores))}
