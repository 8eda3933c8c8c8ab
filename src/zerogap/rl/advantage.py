"""From rewards to advantages, and from samples to the batch that a trainer takes.

GRPO (Shao et al. 2024, "DeepSeekMath", section 4.1): the advantage of a completion is its reward minus the mean
reward of its group (all completions of one prompt), divided by a standard deviation or, following Liu et al. 2025
("Dr. GRPO"), not. Means are exact (`moments.exact_sum`), so a group of equal rewards has advantages of exactly 0,
whatever the reward. `step_advantages` puts together what a recipe asks for:

- baseline `leave_one_out` (RLOO; Kool et al. 2019, Ahmadian et al. 2024, "Back to basics", section 2): the mean of the
  k - 1 other rewards of the group is subtracted;
- `whiten` (REINFORCE++; Hu et al. 2025): (A - mean) / sqrt(variance + 1e-8) over all live tokens of the batch;
- the KL in the reward, with c_t = beta * estimate of a token's KL to the reference: R - sum of c_t over the completion,
  or, without a baseline (REINFORCE++), A_t = R - sum of c_i over i >= t;
- soft overlong punishment (DAPO; Yu et al. 2025, equation 13), added to the reward.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np

from zerogap.config import AlgorithmConfig
from zerogap.errors import ConfigError, NonFiniteError
from zerogap.moments import Moments, exact_sum
from zerogap.rl.loss import reference_kl
from zerogap.types import Sample, TrainBatch

SCALE_EPS = 1e-4
"""Added to the standard deviation that divides (TRL's value)."""

WHITEN_EPS = 1e-8
"""Added to the variance under the root where a batch is whitened (verl's value)."""

BASELINES = ("group", "leave_one_out", "none")


@dataclasses.dataclass(frozen=True, eq=False)
class Advantages:
    """Advantages of S samples.

    Attributes:
        values: float64 [S]; 0 where the reward is missing.
        valid: bool [S]; False where the reward is missing (None), so that the sample takes no part in the loss.
        metrics: `reward`, `reward_std` (of the groups) and `frac_reward_zero_std`, as moments.
        tokens: float64 [C] per sample where tokens of one completion differ; `values` are their means then. Else None.
    """

    values: np.ndarray
    valid: np.ndarray
    metrics: Mapping[str, Moments]
    tokens: tuple[np.ndarray, ...] | None = None


def group_advantages(
    rewards: Sequence[float | None],
    groups: Sequence[int],
    scale_rewards: str,
    baseline: str = "group",
    kept: Sequence[bool] | None = None,
) -> Advantages:
    """Advantages relative to each sample's group.

    Args:
        rewards: one per sample; None is left out of every mean and count.
        groups: name of each sample's group (its prompt's slot).
        scale_rewards: `group` or `batch`: divide by that set's standard deviation (n - 1 in the denominator) plus 1e-4;
            `none`: do not divide.
        baseline: what is subtracted: the mean of the `group`, of the group's others (`leave_one_out`; 0 for a reward
            without others), or `none`.
        kept: False for samples that a filter leaves out: they count in the metrics, and nowhere else.

    Raises:
        ConfigError: an unknown `scale_rewards` or `baseline`, or a group of fewer than two samples that needs more.
        NonFiniteError: a NaN or infinite reward; names the sample.
    """
    if scale_rewards not in ("group", "batch", "none"):
        raise ConfigError("algorithm.scale_rewards", scale_rewards, "choose group, batch or none")
    if baseline not in BASELINES:
        raise ConfigError("algorithm.baseline", baseline, f"choose one of {', '.join(BASELINES)}")
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
        if len(members) < 2 and baseline != "none":
            raise ConfigError("rollout.num_generations", len(members), "choose 2 or more: a group of 1 has no baseline")
        members = members[valid[members]]
        if not len(members):
            continue
        centred[members] = _centred(values[members], baseline)
        scale[members] = standard_deviation(values[members])
        deviations.append(scale[members[0]])
    spread = np.array(deviations, np.float64)
    metrics = {
        "reward": Moments.of(values[valid]),
        "reward_std": Moments.of(spread),
        "frac_reward_zero_std": Moments.of(spread == 0.0),
    }
    if kept is not None:
        valid &= np.asarray(kept, bool)
        centred[~valid] = 0.0
    if scale_rewards == "batch":
        scale[:] = standard_deviation(values[valid])
    return Advantages(centred if scale_rewards == "none" else centred / (scale + SCALE_EPS), valid, metrics)


def _centred(values: np.ndarray, baseline: str) -> np.ndarray:
    """The rewards of one group, float64 [n], minus the baseline of each."""
    if baseline == "none":
        return values
    if baseline == "group":
        return values - Moments.of(values).mean
    if len(values) < 2:
        return np.zeros_like(values)
    total, others = exact_sum(values), len(values) - 1
    return np.array([float(Fraction(v) - (total - Fraction(v)) / others) for v in values.tolist()], np.float64)


def standard_deviation(values: np.ndarray) -> float:
    """Standard deviation (n - 1 in the denominator), FP64; exactly 0.0 for equal values or fewer than two."""
    if len(values) < 2:
        return 0.0
    deviation = values - Moments.of(values).mean
    return math.sqrt(float(exact_sum(deviation * deviation) / (len(values) - 1)))


def overlong_punishment(lengths: Sequence[int], max_length: int, share: float) -> np.ndarray:
    """float64 [S]: what a completion's length adds to its reward, 0 to -1.

    With L = `max_length` and C = `share` * L tokens: 0 up to L - C tokens, -1 from L on, linear between (Yu et al.
    2025, DAPO, equation 13).
    """
    cache = share * max_length
    over = np.asarray(lengths, np.float64) - (max_length - cache)
    return np.where(over > 0.0, -np.minimum(over / cache, 1.0), 0.0) if cache else np.zeros(len(over))


def reward_kl(
    samples: Sequence[Sample],
    old: Sequence[np.ndarray],
    reference: Sequence[np.ndarray],
    estimator: str,
    beta: float,
) -> list[np.ndarray]:
    """float64 [C] per sample: what each completion token's KL to the reference takes from the reward.

    Args:
        old, reference: float32 [C] per sample, log-probs of the policy before the update and of the reference.
        estimator: `k1`, `k2` or `k3`, as in `loss.reference_kl`.

    Raises:
        NonFiniteError: a NaN or infinity among the log-probs; names sample and position.
    """
    costs = []
    for index, (ours, theirs) in enumerate(zip(old, reference, strict=True)):
        assert len(ours) == len(theirs) == len(samples[index].completion_ids), "one log-prob per completion token"
        bad = np.flatnonzero(~(np.isfinite(ours) & np.isfinite(theirs)))
        if len(bad):
            at = int(bad[0])
            raise NonFiniteError(
                f"log-probs for the KL are {ours[at]} and {theirs[at]} (reference) at sample {index}, completion "
                f"position {at}"
            )
        costs.append(beta * reference_kl(ours.astype(np.float64), theirs.astype(np.float64), estimator)[0])
    return costs


def whitened(advantages: Advantages, masks: Sequence[np.ndarray]) -> Advantages:
    """Advantages minus their mean, divided by sqrt(variance + 1e-8), over all live tokens of the batch.

    The variance has n - 1 in its denominator; each token counts once, so a completion counts by its length. Exactly 0
    where all are equal.

    Args:
        masks: bool [C] per sample; True where a token is live.
    """
    tokens = advantages.tokens
    if tokens is None:
        tokens = tuple(np.full(len(m), v) for v, m in zip(advantages.values.tolist(), masks, strict=True))
    live = np.concatenate([np.zeros(0), *(t[m] for t, m in zip(tokens, masks, strict=True))])
    mean = Moments.of(live).mean
    factor = 1.0 / math.sqrt(standard_deviation(live) ** 2 + WHITEN_EPS)
    if advantages.tokens is not None:
        return _of_tokens(advantages, tuple((t - mean) * factor for t in tokens), masks)
    values = np.where(advantages.valid, (advantages.values - mean) * factor, 0.0)
    return dataclasses.replace(advantages, values=values)


def _of_tokens(advantages: Advantages, tokens: tuple[np.ndarray, ...], masks: Sequence[np.ndarray]) -> Advantages:
    means = np.array([Moments.of(t[m]).mean for t, m in zip(tokens, masks, strict=True)], np.float64)
    return dataclasses.replace(advantages, values=means, tokens=tokens)


def step_advantages(
    algorithm: AlgorithmConfig,
    max_completion_length: int,
    samples: Sequence[Sample],
    rewards: Sequence[float | None],
    groups: Sequence[int],
    kept: Sequence[bool] | None = None,
    old: Sequence[np.ndarray] | None = None,
    reference: Sequence[np.ndarray] | None = None,
) -> Advantages:
    """The advantages of a step as a recipe's `algorithm` section asks for them; formulas in the module's text.

    Args:
        max_completion_length: tokens.
        samples: in global-batch order.
        rewards, groups, kept: one each per sample, as in `group_advantages`.
        old: float32 [C] per sample, log-probs of the policy that the update starts from; None: the rollout's own.
        reference: the same by the reference model; needed where the KL is part of the reward.

    Raises:
        NonFiniteError: see `group_advantages` and `reward_kl`.
    """
    lengths = [len(s.completion_ids) for s in samples]
    if algorithm.overlong_share:
        added = overlong_punishment(lengths, max_completion_length, algorithm.overlong_share).tolist()
        rewards = [None if r is None else r + a for r, a in zip(rewards, added, strict=True)]
    costs = None
    if algorithm.kl_in_reward and algorithm.beta:
        assert reference is not None, "the KL in the reward needs the reference's log-probs"
        old = [s.logprobs for s in samples] if old is None else old
        costs = reward_kl(samples, old, reference, algorithm.kl_estimator, algorithm.beta)
    scale = "none" if algorithm.scale_rewards == "whiten" else algorithm.scale_rewards
    advantages = group_advantages(rewards, groups, scale, algorithm.baseline, kept)
    to_go = costs is not None and algorithm.baseline == "none"
    if costs is not None and not to_go:
        rewards = [None if r is None else r - math.fsum(c.tolist()) for r, c in zip(rewards, costs, strict=True)]
        with_kl = group_advantages(rewards, groups, scale, algorithm.baseline, kept)
        advantages = dataclasses.replace(advantages, values=with_kl.values)  # the KL has a metric of its own
    masks = live_masks(samples, advantages, algorithm.mask_truncated_completions)
    if to_go:
        assert costs is not None, "rewards to go are those of a KL"
        left = [np.cumsum(c[::-1])[::-1] for c in costs]
        advantages = _of_tokens(
            advantages, tuple(v - s for v, s in zip(advantages.values.tolist(), left, strict=True)), masks
        )
    return whitened(advantages, masks) if algorithm.scale_rewards == "whiten" else advantages


def live_masks(
    samples: Sequence[Sample], advantages: Advantages, mask_truncated_completions: bool
) -> tuple[np.ndarray, ...]:
    """bool [C] per sample: True where a completion token takes part in the loss.

    It does unless its sample has no reward, was left out or aborted, or is truncated (`finish_reason` is `length`) and
    `mask_truncated_completions` is set.
    """
    assert len(samples) == len(advantages.values), "one advantage per sample"
    dead = ("abort", "length") if mask_truncated_completions else ("abort",)
    return tuple(
        np.full(len(s.completion_ids), valid and s.finish_reason not in dead, bool)
        for s, valid in zip(samples, advantages.valid, strict=True)
    )


def build_batch(
    samples: Sequence[Sample],
    advantages: Advantages,
    mask_truncated_completions: bool,
    ref_logprobs: Sequence[np.ndarray] | None = None,
    old_logprobs: Sequence[np.ndarray] | None = None,
) -> TrainBatch:
    """The trainer's batch: samples with advantages and masks (`live_masks`)."""
    return TrainBatch(
        samples=tuple(samples),
        advantages=advantages.values,
        masks=live_masks(samples, advantages, mask_truncated_completions),
        old_logprobs=None if old_logprobs is None else tuple(old_logprobs),
        ref_logprobs=None if ref_logprobs is None else tuple(ref_logprobs),
        token_advantages=advantages.tokens,
    )
