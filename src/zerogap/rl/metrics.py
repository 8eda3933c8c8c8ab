"""The names under which a step's numbers are logged.

Inside, a metric is a set of moments (exact sum, count, minimum, maximum) that pools over micro-batches and ranks of any
size; here each set becomes the flat names users know from TRL.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from zerogap.moments import Moments
from zerogap.rl.data_rows import Row
from zerogap.rl.reward import RewardScores
from zerogap.rollout.progress import Statistics
from zerogap.types import Sample

ONE_SIDED = "one_sided"  # 1.0 in every step of a run whose rollout is declared to compute other bits than the trainer

STATISTICS = {
    "clip_ratio/low": {"clip_ratio/low_mean": "mean"},
    "clip_ratio/high": {"clip_ratio/high_mean": "mean"},
    "clip_ratio/region": {"clip_ratio/region_mean": "mean"},
    "sampling/sampling_logp_difference": {
        "sampling/sampling_logp_difference/mean": "mean",
        "sampling/sampling_logp_difference/max": "maximum",
    },
    "sampling/importance_sampling_ratio": {
        "sampling/importance_sampling_ratio/min": "minimum",
        "sampling/importance_sampling_ratio/mean": "mean",
        "sampling/importance_sampling_ratio/max": "maximum",
    },
    "sampling/raw_importance_sampling_ratio": {
        "sampling/raw_importance_sampling_ratio/min": "minimum",
        "sampling/raw_importance_sampling_ratio/mean": "mean",
        "sampling/raw_importance_sampling_ratio/max": "maximum",
    },
    "sampling/squared_importance_sampling_ratio": {},
    "bit_wise/logprob_diff": {"bit_wise/logprob_diff/mean": "mean", "bit_wise/logprob_diff/max": "maximum"},
    "bit_wise/ratio_tokens_different": {"bit_wise/ratio_tokens_different/mean": "mean"},
    "completions/length": {
        "completions/mean_length": "mean",
        "completions/min_length": "minimum",
        "completions/max_length": "maximum",
    },
    "completions/terminated_length": {"completions/mean_terminated_length": "mean"},
    "completions/clipped": {"completions/clipped_ratio": "mean"},
}


def flatten(metrics: Mapping[str, Moments]) -> dict[str, float]:
    """Logged name -> number. A metric without an entry in `STATISTICS` is logged as its mean; empty sets are left out.

    `bit_wise/mismatched_tokens` and `bit_wise/compared_tokens` are the counts behind the bit comparison. The effective
    sample size of weights w is (sum w)^2 / (n sum w^2), the share of n tokens that would say as much with equal weights
    (Kong 1992); 0 where all weights are 0.
    """
    flat: dict[str, float] = {}
    for name, moments in metrics.items():
        if moments.count:
            flat |= {key: getattr(moments, stat) for key, stat in STATISTICS.get(name, {name: "mean"}).items()}
    different = metrics.get("bit_wise/ratio_tokens_different")
    if different is not None:
        flat["bit_wise/mismatched_tokens"] = float(different.total)
        flat["bit_wise/compared_tokens"] = float(different.count)
    weights, squares = (metrics.get(f"sampling/{n}importance_sampling_ratio") for n in ("", "squared_"))
    if weights is not None and squares is not None and weights.count:
        size = weights.total * weights.total / (weights.count * squares.total) if squares.total else 0
        flat["sampling/effective_sample_size"] = float(size)
    return flat


def speculation_metrics(before: Statistics, after: Statistics) -> dict[str, float]:
    """What guessing did between two states of an engine's counts; empty where nothing was decoded."""
    decoded, cost = after.decode_tokens - before.decode_tokens, after.decode_cost - before.decode_cost
    guessed, accepted = (getattr(after, f"{n}_tokens") - getattr(before, f"{n}_tokens") for n in ("draft", "accepted"))
    if not decoded:
        return {}
    return {
        "speculation/acceptance_rate": accepted / guessed if guessed else 0.0,
        "speculation/tokens_per_pass": (decoded + accepted) / decoded,
        "speculation/speed_up": (after.plain_cost - before.plain_cost) / cost,
    }


def completion_metrics(samples: Sequence[Sample]) -> dict[str, Moments]:
    """Lengths of completions in tokens, and the share that was cut at the longest allowed length."""
    lengths = np.array([len(s.completion_ids) for s in samples], np.float64)
    cut = np.array([s.finish_reason == "length" for s in samples], bool)
    return {
        "completions/length": Moments.of(lengths),
        "completions/terminated_length": Moments.of(lengths[~cut]),
        "completions/clipped": Moments.of(cut),
    }


def reward_metrics(names: Sequence[str], scores: RewardScores) -> dict[str, float]:
    """`rewards/{f}/mean` and `rewards/{f}/std` (n - 1 in the denominator) per reward function, None left out;
    `rewards/errors` and `rewards/timeouts`: scores missing because a function failed or was too slow; what functions
    logged themselves.

    Args:
        names: one per function.
    """
    flat: dict[str, float] = {"rewards/errors": float(scores.errors), "rewards/timeouts": float(scores.timeouts)}
    for name, column in zip(names, scores.columns, strict=True):
        values = np.array([v for v in column if v is not None], np.float64)
        if len(values):
            flat[f"rewards/{name}/mean"] = Moments.of(values).mean
            flat[f"rewards/{name}/std"] = float(values.std(ddof=1)) if len(values) > 1 else 0.0
    return flat | scores.metrics


def source_metrics(rows: Sequence[Row], scores: RewardScores) -> dict[str, float]:
    """`reward/{data set}`: mean reward of the completions of each data set, where several are mixed.

    Args:
        rows: one per completion.
    """
    found: dict[str, list[float]] = {}
    for row, total in zip(rows, scores.totals, strict=True):
        if total is not None:
            found.setdefault(row.source, []).append(total)
    if len({row.source for row in rows}) < 2:
        return {}
    return {f"reward/{name.replace('/', '.')}": math.fsum(values) / len(values) for name, values in found.items()}
