"""The gap between the rollout's log-probs and the trainer's, as numbers.

Where both sides follow one contract every figure here is that of identity: differences 0, ratios 1, no differing bit.
Bits are compared as integers, so that -0 and +0 differ and equal NaNs do not pass as a difference of size 0.
"""

import math

import numpy as np

from zerogap.moments import Moments
from zerogap.types import TokenRows

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +- this before they are exponentiated."""


def exponential(values: np.ndarray) -> np.ndarray:
    """e^x of a float64 array by the C library, value by value: a result cannot depend on its neighbours."""
    return np.array([math.exp(v) for v in values.tolist()], np.float64)


def different_bits(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """bool [T]: where two float32 arrays differ in any bit."""
    assert a.dtype == b.dtype == np.float32, f"float32 bits are compared, not {a.dtype} and {b.dtype}"
    return np.ascontiguousarray(a).view(np.int32) != np.ascontiguousarray(b).view(np.int32)


def mismatch_metrics(rows: TokenRows) -> dict[str, Moments]:
    """Moments over the live tokens that the rollout drew at the trainer's own weight version.

    `sampling/sampling_logp_difference` |d| and `sampling/importance_sampling_ratio` e^d with d = trainer - rollout;
    `bit_wise/logprob_diff` |d| and `bit_wise/ratio_tokens_different` 1 where any bit differs, else 0 (its total is the
    number of mismatched tokens). Computed in FP64 from the FP32 log-probs.
    """
    chosen = rows.mask & rows.current
    ours, theirs = rows.logp[chosen], rows.rollout_logp[chosen]
    difference = ours.astype(np.float64) - theirs.astype(np.float64)
    size = Moments.of(np.abs(difference))
    ratio = exponential(np.clip(difference, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    return {
        "sampling/sampling_logp_difference": size,
        "sampling/importance_sampling_ratio": Moments.of(ratio),
        "bit_wise/logprob_diff": size,
        "bit_wise/ratio_tokens_different": Moments.of(different_bits(ours, theirs)),
    }
