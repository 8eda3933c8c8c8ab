"""The policy loss and its derivative, as a pure function of per-token numbers.

The trainer does not differentiate through this file: it hands in the log-probs of a micro-batch and gets back, for each
completion token, the derivative of the *global* loss by its log-prob. Denominators are counted over the whole global
batch before any micro-batch runs, every per-token result is computed in FP64 from that token's own numbers and rounded
once to FP32, and the loss itself is an exact sum. So neither the loss nor a gradient depends on micro-batches, packing
or ranks.

Per live token, with x the trainer's log-prob, r = exp(clamp(x - old, +-20)) and A the advantage:

    l = -w min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A) + beta * KL - entropy_coef * entropy

With `surrogate` cispo the first term is -w clip(r, 1 - epsilon, 1 + epsilon_high) A x, its clipped ratio a number that
is not differentiated. With `level` sequence r is the geometric mean of the ratios of the sample's live tokens, and its
derivative by x is r: GSPO-token, which is GSPO where all tokens of a sample have one advantage. A micro-batch therefore
holds whole samples.

w is 1, or the importance weight that a correction gave the token (rl/correction.py): a number, never differentiated.
A token that a correction rejected is not live, so denominators count without it; one of weight 0 is.

Clipped surrogate: Schulman et al. 2017 (PPO), equation 7; asymmetric range and token mean: Yu et al. 2025 (DAPO),
equation 8; constant length: Liu et al. 2025 (Dr. GRPO); sequence ratio: Zheng et al. 2025 ("Group sequence policy
optimization"), equation 5 and section 4.3; cispo: MiniMax 2025 ("MiniMax-M1"), equations 4 and 5. KL estimates with
d = x - ref, clamped to +-20 (Schulman, "Approximating KL divergence"): k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. A
clamp has derivative 0 beyond its limit.
"""

import dataclasses
import math

import numpy as np

from zerogap.config import AlgorithmConfig
from zerogap.errors import ConfigError, NonFiniteError
from zerogap.moments import Moments, exact_sum
from zerogap.rl.correction import LOG_RATIO_LIMIT, exponential, mismatch_metrics
from zerogap.types import Denominators, LossResult, TokenRows, TrainBatch

LOSS_TYPES = ("dapo", "grpo", "dr_grpo", "sequence_sum")
SURROGATES = ("clip", "cispo")
LEVELS = ("token", "sequence")


@dataclasses.dataclass(frozen=True)
class PolicyLoss:
    """GRPO and its relatives; implements `types.Loss`.

    Attributes:
        loss_type: weight of a live token of a sample with n live tokens, in a batch of N live tokens in S sequences
            that have any: `dapo` 1/N, `grpo` 1/(S n), `dr_grpo` 1/(S max_completion_length), `sequence_sum` 1/S.
        epsilon, epsilon_high: the ratio is clipped to [1 - epsilon, 1 + epsilon_high].
        beta, kl_estimator: weight and kind (`k1`, `k2`, `k3`) of the KL to the reference.
        entropy_coef: weight of the entropy, subtracted.
        max_completion_length: tokens; only for `dr_grpo`.
        surrogate: `clip`, or `cispo` (epsilon of 1 or more: no lower bound).
        level: whose ratio is clipped, a `token`'s or a `sequence`'s.
    """

    loss_type: str = "dapo"
    epsilon: float = 0.2
    epsilon_high: float = 0.2
    beta: float = 0.0
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0
    max_completion_length: int = 0
    surrogate: str = "clip"
    level: str = "token"

    def __post_init__(self) -> None:
        if self.loss_type not in LOSS_TYPES:
            raise ConfigError("algorithm.loss_type", self.loss_type, f"choose one of {', '.join(LOSS_TYPES)}")
        if self.kl_estimator not in ("k1", "k2", "k3"):
            raise ConfigError("algorithm.kl_estimator", self.kl_estimator, "choose k1, k2 or k3")
        if self.surrogate not in SURROGATES:
            raise ConfigError("algorithm.surrogate", self.surrogate, f"choose one of {', '.join(SURROGATES)}")
        if self.level not in LEVELS:
            raise ConfigError("algorithm.importance_sampling_level", self.level, f"choose {' or '.join(LEVELS)}")
        if self.loss_type == "dr_grpo" and self.max_completion_length < 1:
            raise ConfigError("rollout.max_completion_length", self.max_completion_length, "dr_grpo divides by it")

    @classmethod
    def from_config(cls, algorithm: AlgorithmConfig, max_completion_length: int) -> "PolicyLoss":
        """The loss that a recipe asks for."""
        return cls(
            loss_type=algorithm.loss_type,
            epsilon=algorithm.epsilon,
            epsilon_high=algorithm.clip_high,
            beta=algorithm.loss_beta,
            kl_estimator=algorithm.kl_estimator,
            entropy_coef=algorithm.entropy_coef,
            max_completion_length=max_completion_length,
            surrogate=algorithm.surrogate,
            level=algorithm.importance_sampling_level,
        )

    def denominators(self, batch: TrainBatch) -> Denominators:
        """Live tokens and sequences of the whole global batch."""
        counts = np.array([int(mask.sum()) for mask in batch.masks], np.int64)
        return Denominators(tokens=int(counts.sum()), sequences=int((counts > 0).sum()), sample_tokens=counts)

    def __call__(self, rows: TokenRows, denominators: Denominators) -> LossResult:
        """Loss, derivatives and metrics of one micro-batch; see the module's text.

        Raises:
            NonFiniteError: a NaN or infinity at a live position; names sample and position.
            ConfigError: `beta` is set and the rows carry no reference log-probs.
        """
        if self.beta and rows.ref_logp is None:
            raise ConfigError("algorithm.beta", self.beta, "give the batch reference log-probs, or set beta to 0")
        _require_finite(rows)
        live = rows.mask
        logp = rows.logp[live].astype(np.float64)
        weight = self._weights(rows.sample[live], denominators)
        log_ratio = logp - rows.old_logp[live].astype(np.float64)
        if self.level == "sequence":
            log_ratio = _sequence_means(log_ratio, rows.sample[live], denominators)
        value, slope, metrics = self._surrogate(logp, log_ratio, rows.advantage[live])
        if rows.weights is not None:
            value, slope = value * rows.weights[live], slope * rows.weights[live]
        if rows.ref_logp is not None:
            kl, kl_slope = reference_kl(logp, rows.ref_logp[live].astype(np.float64), self.kl_estimator)
            value, slope = value + self.beta * kl, slope + self.beta * kl_slope
            metrics["kl"] = Moments.of(kl)
        entropy = rows.entropy[live].astype(np.float64)
        value = value - self.entropy_coef * entropy
        metrics["entropy"] = Moments.of(entropy)
        dlogp = np.zeros(live.shape, np.float32)
        with np.errstate(over="ignore"):
            dlogp[live] = weight * slope
        _require_finite(rows, dlogp)
        dentropy = None
        if self.entropy_coef:
            dentropy = np.zeros(live.shape, np.float32)
            dentropy[live] = -self.entropy_coef * weight
        return LossResult(exact_sum(weight * value), dlogp, dentropy, metrics | mismatch_metrics(rows))

    def _weights(self, sample: np.ndarray, denominators: Denominators) -> np.ndarray:
        """float64: what each live token's loss is multiplied by."""
        if self.loss_type == "dapo":
            return np.ones(len(sample)) / denominators.tokens if len(sample) else np.zeros(0)
        if self.loss_type == "grpo":
            return 1.0 / (denominators.sequences * denominators.sample_tokens[sample].astype(np.float64))
        length = self.max_completion_length if self.loss_type == "dr_grpo" else 1
        return np.ones(len(sample)) / (denominators.sequences * length) if len(sample) else np.zeros(0)

    def _surrogate(
        self, logp: np.ndarray, log_ratio: np.ndarray, advantage: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, dict[str, Moments]]:
        """(loss, derivative by logp, clip metrics) of the surrogate, per token."""
        inside = np.abs(log_ratio) <= LOG_RATIO_LIMIT
        ratio = exponential(np.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
        low, high = 1.0 - self.epsilon, 1.0 + self.epsilon_high
        if self.surrogate == "cispo":
            weight = np.clip(ratio, low, high)
            return -weight * advantage * logp, -weight * advantage, _clipped(ratio < low, ratio > high)
        plain, clipped = ratio * advantage, np.clip(ratio, low, high) * advantage
        # Where both branches tie, the ratio is within the range or the advantage is 0: take the plain one's slope.
        slope = np.where((plain <= clipped) & inside, -plain, 0.0)
        metrics = _clipped((ratio < low) & (advantage < 0), (ratio > high) & (advantage > 0))
        return -np.minimum(plain, clipped), slope, metrics


def reference_kl(logp: np.ndarray, ref: np.ndarray, estimator: str) -> tuple[np.ndarray, np.ndarray]:
    """(estimate `k1`, `k2` or `k3`, derivative by logp) of the KL to the reference, float64 [T] each."""
    inside = np.abs(logp - ref) <= LOG_RATIO_LIMIT
    d = np.clip(logp - ref, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if estimator == "k1":
        return d, inside.astype(np.float64)
    if estimator == "k2":
        return 0.5 * d * d, np.where(inside, d, 0.0)
    growth = np.array([math.expm1(-v) for v in d.tolist()], np.float64)
    return growth + d, np.where(inside, -growth, 0.0)


def _sequence_means(values: np.ndarray, sample: np.ndarray, denominators: Denominators) -> np.ndarray:
    """float64 [T]: for each live token the mean of `values` over its sample's live tokens, an exact sum divided."""
    names, place, counts = np.unique(sample, return_inverse=True, return_counts=True)
    whole = denominators.sample_tokens[names]
    assert (counts == whole).all(), f"samples {names[counts != whole]} are split over micro-batches"
    parts = np.split(values[np.argsort(place, kind="stable")], np.cumsum(counts)[:-1]) if len(names) else []
    return np.array([math.fsum(part.tolist()) for part in parts], np.float64)[place] / counts[place]


def _clipped(low: np.ndarray, high: np.ndarray) -> dict[str, Moments]:
    return {
        "clip_ratio/low": Moments.of(low),
        "clip_ratio/high": Moments.of(high),
        "clip_ratio/region": Moments.of(low | high),
    }


def _require_finite(rows: TokenRows, dlogp: np.ndarray | None = None) -> None:
    """Raise `NonFiniteError` for the first live token with a NaN or infinity in any number (or in its derivative)."""
    columns = (
        {"derivative of the loss": dlogp}
        if dlogp is not None
        else {
            "trainer log-prob": rows.logp,
            "rollout log-prob": rows.rollout_logp,
            "old log-prob": rows.old_logp,
            "reference log-prob": rows.ref_logp,
            "entropy": rows.entropy,
            "advantage": rows.advantage,
            "importance weight": rows.weights,
        }
    )
    for name, values in columns.items():
        if values is None:
            continue
        bad = np.flatnonzero(rows.mask & ~np.isfinite(values))
        if len(bad):
            at = int(bad[0])
            raise NonFiniteError(
                f"{name} is {values[at]} at sample {rows.sample[at]}, completion position {rows.position[at]} "
                f"({len(bad)} such tokens in this micro-batch)"
            )
