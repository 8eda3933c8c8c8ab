"""From rewards to advantages, and from samples to the batch that a trainer takes.

GRPO (Shao et al. 2024, "DeepSeekMath", section 4.1): the advantage of a completion is its reward minus the mean
reward of its group (all completions of one prompt), divided by a standard deviation or, following Liu et al. 2025
("Dr. GRPO"), not. Means are exact (`types.exact_sum`), so a group of equal rewards has advantages of exactly 0,
whatever the reward.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from zerogap.errors import ConfigError, NonFiniteError
from zerogap.moments import Moments, exact_sum
from zerogap.types import Sample, TrainBatch

SCALE_EPS = 1e-4
"""Added to the standard deviation that divides (TRL's value)."""


@dataclasses.dataclass(frozen=True, eq=False)
class Advantages:
    """Advantages of S samples.

    Attributes:
        values: float64 [S]; 0 where the reward is missing.
        valid: bool [S]; False where the reward is missing (None), so that the sample takes no part in the loss.
        metrics: `reward`, `reward_std` (of the groups) and `frac_reward_zero_std`, as moments.
    """

    values: np.ndarray
    valid: np.ndarray
    metrics: Mapping[str, Moments]


def group_advantages(rewards: Sequence[float | None], groups: Sequence[int], scale_rewards: str) -> Advantages:
    """Advantages relative to each sample's group.

    Args:
        rewards: one per sample; None is left out of every mean and count.
        groups: name of each sample's group (its prompt's slot).
        scale_rewards: `group` or `batch`: divide by that set's standard deviation (n - 1 in the denominator) plus 1e-4;
            `none`: do not divide.

    Raises:
        ConfigError: an unknown `scale_rewards`, or a group of fewer than two samples.
        NonFiniteError: a NaN or infinite reward; names the sample.
    """
    if scale_rewards not in ("group", "batch", "none"):
        raise ConfigError("algorithm.scale_rewards", scale_rewards, "choose group, batch or none")
    assert len(rewards) == len(groups), "one group per reward"
    valid = np.array([r is not None for r in rewards], bool)
    values = np.array([0.0 if r is None else r for r in rewards], np.float64)
    if not np.isfinite(values).all():
        index = int(np.flatnonzero(~np.isfinite(values))[0])
        raise NonFiniteError(f"reward of sample {index} is {values[index]}")
    centred = np.zeros_like(values)
    scale = np.zeros_like(values)
    deviations = []
    names = np.asarray(groups)
    for group in dict.fromkeys(groups):
        members = np.flatnonzero(names == group)
        if len(members) < 2:
            raise ConfigError("rollout.num_generations", len(members), "choose 2 or more: a group of 1 has no baseline")
        members = members[valid[members]]
        if not len(members):
            continue
        centred[members] = values[members] - Moments.of(values[members]).mean
        scale[members] = standard_deviation(values[members])
        deviations.append(scale[members[0]])
    if scale_rewards == "batch":
        scale[:] = standard_deviation(values[valid])
    advantages = centred if scale_rewards == "none" else centred / (scale + SCALE_EPS)
    spread = np.array(deviations, np.float64)
    metrics = {
        "reward": Moments.of(values[valid]),
        "reward_std": Moments.of(spread),
        "frac_reward_zero_std": Moments.of(spread == 0.0),
    }
    return Advantages(advantages, valid, metrics)


def standard_deviation(values: np.ndarray) -> float:
    """Standard deviation (n - 1 in the denominator), FP64; exactly 0.0 for equal values or fewer than two."""
    if len(values) < 2:
        return 0.0
    deviation = values - Moments.of(values).mean
    return math.sqrt(float(exact_sum(deviation * deviation) / (len(values) - 1)))


def build_batch(
    samples: Sequence[Sample],
    advantages: Advantages,
    mask_truncated_completions: bool,
    ref_logprobs: Sequence[np.ndarray] | None = None,
    old_logprobs: Sequence[np.ndarray] | None = None,
) -> TrainBatch:
    """The trainer's batch: samples with advantages and masks.

    A completion token is live unless its sample has no reward, was aborted, or is truncated (`finish_reason` is
    `length`) and `mask_truncated_completions` is set.
    """
    assert len(samples) == len(advantages.values), "one advantage per sample"
    dead = ("abort", "length") if mask_truncated_completions else ("abort",)
    masks = tuple(
        np.full(len(s.completion_ids), valid and s.finish_reason not in dead, bool)
        for s, valid in zip(samples, advantages.valid, strict=True)
    )
    return TrainBatch(
        samples=tuple(samples),
        advantages=advantages.values,
        masks=masks,
        old_logprobs=None if old_logprobs is None else tuple(old_logprobs),
        ref_logprobs=None if ref_logprobs is None else tuple(ref_logprobs),
    )
