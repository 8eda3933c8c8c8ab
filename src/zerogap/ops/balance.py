"""How evenly routers spread tokens over experts: the balance loss as a number, and the update of correction biases.

Balance loss per sequence (DeepSeek-V3, section 2.1.2) of T tokens, E experts, k chosen per token:

    f_i = E / (k T) * (tokens that chose expert i),  P_i = mean over tokens of s_i / sum(s),  loss = sum_i f_i P_i

It is 1 where both are even, E / k at worst. Here it is only a figure, in FP64; its gradient is part of `ops.moe`.

A correction bias (section 2.1.2, "auxiliary-loss-free load balancing") rises by `rate` where an expert got fewer tokens
than the mean and falls where it got more: sign(mean - count) is taken of integers, the addition is FP32.
"""

import numpy as np
import torch

from zerogap.ops.moe import Routing


def balance_losses(
    logits: torch.Tensor, experts: torch.Tensor, routing: Routing, sample_starts: torch.Tensor
) -> np.ndarray:
    """The balance loss of each sequence of a routed layer.

    Args:
        logits: FP32 [T, E] of the router.
        experts: int32 [T, k].
        routing: how scores follow from logits.
        sample_starts: int32 [S + 1] first row of each sequence, then T.

    Returns:
        float64 [S]. A sequence's number depends on its own rows only.
    """
    z = logits.numpy().astype(np.float64)
    if routing.scoring == "softmax":
        scores = np.exp(z - z.max(1, keepdims=True))
    else:
        scores = 1.0 / (1.0 + np.exp(np.minimum(-z, 700.0)))
    shares = scores / scores.sum(1, keepdims=True)
    losses = []
    for first, last in zip(sample_starts[:-1].tolist(), sample_starts[1:].tolist(), strict=True):
        counts = np.bincount(experts[first:last].numpy().ravel(), minlength=routing.num_experts)
        tokens = last - first
        fractions = counts * (routing.num_experts / (routing.top_k * tokens))
        losses.append((fractions * (shares[first:last].sum(0) / tokens)).sum())
    return np.array(losses, np.float64)


def expert_counts(experts: torch.Tensor, num_experts: int) -> np.ndarray:
    """int64 [layers, E]: how many of the rows of int32 [layers, T, k] chose each expert."""
    return np.stack([np.bincount(layer.numpy().ravel(), minlength=num_experts) for layer in experts]).astype(np.int64)


def update_bias(bias: torch.Tensor, counts: np.ndarray, rate: float) -> None:
    """Raise the biases of experts with fewer tokens than the mean, lower those with more; in place.

    Args:
        bias: FP32 [E].
        counts: int64 [E] tokens per expert over the global batch.
        rate: the step, rounded to FP32.
    """
    direction = np.sign(counts.sum() - counts * len(counts))  # of E * (mean - count)
    bias += torch.from_numpy(direction.astype(np.float32)) * float(np.float32(rate))
