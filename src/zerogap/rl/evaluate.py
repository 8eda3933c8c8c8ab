"""What a held-out evaluation reports, from scores alone; the caller generates and scores the completions."""

import math
from collections.abc import Sequence
from fractions import Fraction

from zerogap.errors import ConfigError


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


def summarise(
    scores: Sequence[Sequence[float | None]], pass_k: Sequence[int] = (1,), threshold: float = 1.0
) -> dict[str, float]:
    """Figures over all held-out prompts.

    Args:
        scores: [prompts][n] rewards; None (no reward) counts as not correct and as 0 in the mean.
        pass_k: report pass@k for these k.
        threshold: a completion is correct if its reward is at least this.

    Returns:
        `eval/accuracy` (share of correct completions), `eval/mean@n` (mean reward; n = completions per prompt),
        `eval/pass@k`, `eval/num_prompts`.

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
    correct = [sum(s is not None and s >= threshold for s in row) for row in scores]
    result = {
        "eval/accuracy": sum(correct) / (n * len(scores)),
        f"eval/mean@{n}": math.fsum(s for row in numbers for s in row) / (n * len(scores)),
    }
    for k in pass_k:
        result[f"eval/pass@{k}"] = math.fsum(pass_at_k(n, c, k) for c in correct) / len(scores)
    return result | {"eval/num_prompts": float(len(scores))}
