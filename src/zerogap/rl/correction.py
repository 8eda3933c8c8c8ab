"""The gap between the rollout's log-probs and the trainer's: as numbers, and corrected where it cannot be closed.

With d = log p_trainer - log p_rollout of a drawn token and rho = e^d, a gradient that is an average over the rollout's
tokens is one of the trainer's policy only if each token counts rho times. `correct` computes such weights, cut or
masked where they would ruin the variance, once for a whole batch and before any micro-batch, and hands them to the loss
as numbers: nothing is differentiated through them. Where both sides follow one contract every figure here is that of
identity (differences 0, ratios 1, no differing bit) and nothing needs correcting.

Weights (C, a, b: the bounds): truncated, min(rho, C), Yao et al. 2025, "Your efficient RL framework secretly brings
you off-policy RL training"; masked, and at the level of a completion (product of its ratios) or of its geometric mean,
Liu et al. 2025, "When speed kills stability"; IcePop, rho inside [a, b] else 0, Ling team 2025. A *rejected* token
leaves the loss's mask and so its denominators; one of weight 0 stays in them. That is verl 0.9.1's rule
(`rollout_corr_helper`), which these functions follow; they differ from it where its docstrings or this say so:

- k1 is d here, so bounds are on the trainer's ratio (verl: -d, bounds on 1 / rho);
- `normalise` takes the mean over what is left after rejection (verl: before it);
- the veto of whole completions and `sequence_mask` (TRL's mode of that name) are not in verl 0.9.1;
- sequence figures are averaged over completions with a live token (verl: over all rows of the batch).

Everything is FP64 over the live tokens alone, so that a NaN at a masked one cannot reach a result; log-ratios are
clamped to +-20 before they are exponentiated; sums are exact and rounded once, so no figure depends on an order or a
micro-batch. Bits are compared as integers, so that -0 and +0 differ and equal NaNs do not pass as a difference of 0.
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from zerogap.config import CorrectionConfig
from zerogap.errors import ConfigError, NonFiniteError
from zerogap.moments import Moments
from zerogap.types import TokenRows, TrainBatch

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +- this before they are exponentiated."""

SMALLEST_MEAN = 1e-8
"""Weights whose mean is not above this are not normalised (verl's bound)."""


def exponential(values: np.ndarray) -> np.ndarray:
    """e^x of a float64 array by the C library, value by value: a result cannot depend on its neighbours."""
    return _each(math.exp, values)


def _each(function: Callable[[float], float], values: np.ndarray) -> np.ndarray:
    return np.array([function(v) for v in values.tolist()], np.float64)


def different_bits(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """bool [T]: where two float32 arrays differ in any bit."""
    assert a.dtype == b.dtype == np.float32, f"float32 bits are compared, not {a.dtype} and {b.dtype}"
    return np.ascontiguousarray(a).view(np.int32) != np.ascontiguousarray(b).view(np.int32)


# ---------------------------------------------------------------------------------------------------- log-ratios


@dataclasses.dataclass(frozen=True, eq=False)
class LogRatios:
    """The log-ratios d of the tokens that count, grouped by completion.

    Attributes:
        values: float64 [T] log p_trainer - log p_rollout, finite.
        group: int64 [T] completion of each token, 0..S-1; every one of the S completions has a token here.
    """

    values: np.ndarray
    group: np.ndarray

    @classmethod
    def between(cls, ours: np.ndarray, theirs: np.ndarray, sample: np.ndarray) -> "LogRatios":
        """From float32 log-probs [T] and the sample that each token belongs to."""
        _, group = np.unique(sample, return_inverse=True)
        return cls(ours.astype(np.float64) - theirs.astype(np.float64), group.astype(np.int64))

    @property
    def clamped(self) -> np.ndarray:
        """float64 [T]: d within +-20."""
        return _clamp(self.values)

    @property
    def counts(self) -> np.ndarray:
        """float64 [S]: tokens per completion."""
        return np.bincount(self.group).astype(np.float64)

    def per_group(self, values: np.ndarray, join: Callable[[list[float]], float]) -> np.ndarray:
        """float64 [S]: `join` over each completion's entries of `values` [T]."""
        order = np.argsort(self.group, kind="stable")
        parts = np.split(values[order], np.cumsum(np.bincount(self.group))[:-1]) if len(values) else []
        return np.array([join(part.tolist()) for part in parts], np.float64)

    def ratios(self, level: str) -> np.ndarray:
        """float64 [T]: the ratio that each token is judged by.

        `token`: its own; `sequence`: the product over its completion; `geometric`: the geometric mean over it.
        """
        if level == "token":
            return exponential(self.clamped)
        total = self.per_group(self.values, math.fsum)
        return exponential(_clamp(total if level == "sequence" else total / self.counts))[self.group]

    def statistic(self, name: str) -> np.ndarray:
        """float64 [T]: the statistic that a rejection judges each token by, such as `token_k1` or `sequence_mean_k3`.

        k1 = d, k2 = d^2 / 2, k3 = e^d - 1 - d with d within +-20 (Schulman, "Approximating KL divergence"); a
        sequence's is the sum, mean or maximum over its tokens.
        """
        level, _, estimator = name.rpartition("_")
        per_token = kl_estimate(self.clamped, estimator)
        if level == "token":
            return per_token
        if level == "sequence_max":
            return self.per_group(per_token, max)[self.group]
        total = self.per_group(per_token, math.fsum)
        return (total if level == "sequence_sum" else total / self.counts)[self.group]


def _clamp(values: np.ndarray) -> np.ndarray:
    return np.clip(values, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def kl_estimate(d: np.ndarray, estimator: str) -> np.ndarray:
    """float64 [T]: `k1` = d, `k2` = d^2 / 2 or `k3` = e^d - 1 - d; the mean of -k1, k2 or k3 estimates
    KL(rollout || trainer)."""
    if estimator == "k1":
        return d
    return 0.5 * d * d if estimator == "k2" else _each(math.expm1, d) - d


# ---------------------------------------------------------------------------------------------------- what is logged


def mismatch_metrics(rows: TokenRows) -> dict[str, Moments]:
    """Moments over the tokens that the rollout drew at the trainer's own weight version, live or rejected.

    Per token `sampling/sampling_logp_difference` |d|, `sampling/importance_sampling_ratio` e^d (left to `correct` where
    that weighted the batch), `sampling/kl` -d, `sampling/k3_kl` e^d - 1 - d, `sampling/chi2_token` e^2d - 1; per
    completion `sampling/chi2_seq` e^2s - 1 with s its sum of d; `bit_wise/logprob_diff` |d| and
    `bit_wise/ratio_tokens_different` 1 where any bit differs, else 0 (its total is the number of mismatched tokens).
    Computed in FP64 from the FP32 log-probs, exponents from clamped log-ratios.
    """
    chosen = rows.mask & rows.current
    if rows.rejected is not None:
        chosen = (rows.mask | rows.rejected) & rows.current
    ours, theirs = rows.logp[chosen], rows.rollout_logp[chosen]
    gap = LogRatios.between(ours, theirs, rows.sample[chosen])
    size = Moments.of(np.abs(gap.values))
    weighted = {} if rows.weights is not None else {"sampling/importance_sampling_ratio": gap.ratios("token")}
    return {
        "sampling/sampling_logp_difference": size,
        "bit_wise/logprob_diff": size,
        "bit_wise/ratio_tokens_different": Moments.of(different_bits(ours, theirs)),
        "sampling/kl": Moments.of(-gap.values),
        "sampling/k3_kl": Moments.of(kl_estimate(gap.clamped, "k3")),
        "sampling/chi2_token": Moments.of(_each(math.expm1, 2.0 * gap.clamped)),
        "sampling/chi2_seq": Moments.of(_each(math.expm1, 2.0 * _clamp(gap.per_group(gap.values, math.fsum)))),
        **{name: Moments.of(values) for name, values in weighted.items()},
    }


# ---------------------------------------------------------------------------------------------------- correction


_LEVELS = {
    "none": None,
    "token_tis": "token",
    "sequence_tis": "sequence",
    "token_mis": "token",
    "sequence_mis": "sequence",
    "sequence_mask": "sequence",
    "geometric_mis": None,
    "icepop": "token",
}
"""The level of each kind's weights; None: all 1."""


def correct(batch: TrainBatch, settings: CorrectionConfig) -> tuple[TrainBatch, dict[str, Moments]]:
    """The batch with importance weights, and without the tokens that the settings reject.

    Args:
        batch: the whole global batch of an update, with the trainer's log-probs under the weights before that update as
            `old_logprobs`.
        settings: what to do; not `active`: the batch is returned as it is.

    Returns:
        The batch with `weights` (0 where not live), `masks` without rejected tokens, and `rejected`; and moments over
        the tokens that were live before, per token: `sampling/raw_importance_sampling_ratio` (at the level of the
        kind), `sampling/importance_sampling_ratio` (the weight that is applied, 0 if rejected) and its square,
        `sampling/frac_modified_importance_sampling_ratio` and `sampling/frac_rejected_tokens`; per completion with a
        live token: `sampling/frac_rejected_sequences` (none left) and `sampling/frac_vetoed_sequences`.

    Raises:
        ConfigError: the trainer's log-probs are missing, so that every ratio would be 1.
        NonFiniteError: a NaN or infinity among the log-probs of a live token; names sample and position.
    """
    if not settings.active:
        return batch, {}
    if batch.old_logprobs is None:
        raise ConfigError(
            "algorithm.correction.kind", settings.kind, "give the batch the trainer's log-probs as old_logprobs"
        )
    lengths = [len(mask) for mask in batch.masks]
    live = _joined(batch.masks, np.bool_)
    sample = np.repeat(np.arange(len(lengths)), lengths)
    ours, theirs = _joined(batch.old_logprobs, np.float32), _joined([s.logprobs for s in batch.samples], np.float32)
    _require_finite(live, sample, ours, theirs, lengths)
    gap = LogRatios.between(ours[live], theirs[live], sample[live])
    raw, weights = importance_weights(gap, settings)
    vetoed = vetoed_tokens(gap, settings.veto)
    kept = accepted_tokens(gap, settings.rejections) & ~vetoed
    modified = (weights != (raw if _LEVELS[settings.kind] else 1.0)) | ~kept
    if settings.normalise:
        weights = normalised_weights(weights, kept, gap.group, per_sequence=_LEVELS[settings.kind] == "sequence")
    weights = np.where(kept, weights, 0.0)
    survivors = gap.per_group(kept.astype(np.float64), max)
    metrics = {
        "sampling/raw_importance_sampling_ratio": Moments.of(raw),
        "sampling/importance_sampling_ratio": Moments.of(weights),
        "sampling/squared_importance_sampling_ratio": Moments.of(weights * weights),
        "sampling/frac_modified_importance_sampling_ratio": Moments.of(modified),
        "sampling/frac_rejected_tokens": Moments.of(~kept),
        "sampling/frac_rejected_sequences": Moments.of(1.0 - survivors),
        "sampling/frac_vetoed_sequences": Moments.of(gap.per_group(vetoed.astype(np.float64), max)),
    }
    columns = np.zeros(len(live), np.float64), live.copy(), np.zeros(len(live), np.bool_)
    for column, values in zip(columns, (weights, kept, ~kept), strict=True):
        column[live] = values
    split = [tuple(np.split(column, np.cumsum(lengths)[:-1])) for column in columns]
    return dataclasses.replace(batch, weights=split[0], masks=split[1], rejected=split[2]), metrics


def importance_weights(gap: LogRatios, settings: CorrectionConfig) -> tuple[np.ndarray, np.ndarray]:
    """float64 [T] each: the ratio that the settings judge a token by, and the weight they give it before rejection."""
    level = _LEVELS[settings.kind]
    if level is None:
        return gap.ratios("geometric" if settings.kind == "geometric_mis" else "token"), np.ones(len(gap.values))
    ratio = gap.ratios(level)
    lower, upper = settings.bounds
    if settings.kind.endswith(("tis", "mis")):  # a kept token's ratio is above the bound only where d was clamped
        assert upper is not None, "truncation and masking have an upper bound"
        return ratio, np.minimum(ratio, upper)
    outside = np.zeros(len(ratio), bool)
    if lower is not None:
        outside |= ratio < lower
    if upper is not None:
        outside |= ratio > upper
    return ratio, np.where(outside, 0.0, ratio)


def accepted_tokens(gap: LogRatios, rejections: dict[str, float | tuple[float, float]]) -> np.ndarray:
    """bool [T]: True where every statistic is within its limit (limits included; for k1 the ratio's pair of bounds)."""
    kept = np.ones(len(gap.values), bool)
    for name, limit in rejections.items():
        statistic = gap.statistic(name)
        if name.endswith("k1"):
            low, high = limit if isinstance(limit, tuple) else (1.0 / limit, limit)
            kept &= (statistic >= math.log(low)) & (statistic <= math.log(high))
        else:
            assert not isinstance(limit, tuple), "k2 and k3 have one limit"
            kept &= statistic <= limit
    return kept


def vetoed_tokens(gap: LogRatios, veto: float) -> np.ndarray:
    """bool [T]: True for every token of a completion in which any token's ratio is below `veto` (0: none)."""
    if not veto:
        return np.zeros(len(gap.values), bool)
    return gap.per_group(gap.values, min)[gap.group] < math.log(veto)


def normalised_weights(weights: np.ndarray, kept: np.ndarray, group: np.ndarray, per_sequence: bool) -> np.ndarray:
    """float64 [T]: weights divided by their mean over the kept tokens, or over the completions that have one.

    Left as they are where nothing is kept or the mean is not above 1e-8.
    """
    chosen = weights[kept]
    if per_sequence:
        _, first = np.unique(group[kept], return_index=True)
        chosen = chosen[first]
    mean = Moments.of(chosen).mean
    return weights / mean if mean > SMALLEST_MEAN else weights


def _joined(columns: "tuple[np.ndarray, ...] | list[np.ndarray]", dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *(np.asarray(column, dtype) for column in columns)])


def _require_finite(
    live: np.ndarray, sample: np.ndarray, ours: np.ndarray, theirs: np.ndarray, lengths: list[int]
) -> None:
    for name, values in (("trainer log-prob", ours), ("rollout log-prob", theirs)):
        bad = np.flatnonzero(live & ~np.isfinite(values))
        if len(bad):
            at = int(bad[0])
            position = at - sum(lengths[: sample[at]])
            raise NonFiniteError(
                f"{name} is {values[at]} at sample {sample[at]}, completion position {position} "
                f"({len(bad)} such tokens in this batch)"
            )
