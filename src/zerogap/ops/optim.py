"""Global gradient norm, AdamW and the addition of gradient arrays. State and schedules belong to the trainer.

Everything works on the unsharded logical tensors, FP32, and is independent of threads. The norm sums squares in FP64:
chunks of 65,536 elements of each tensor (sixteen lanes, then the halving tree), then the fixed tree (adjacent pairs, an
odd last one passes up) over all chunks of all tensors in the order given, which is checkpoint-name order. AdamW is
elementwise (Loshchilov and Hutter 2019, algorithm 2, with the decay scaled by the learning rate); its constants are
computed in FP64 and rounded to FP32 once:

    g = gradient * gradient_scale
    m = fma(b1, m, (1 - b1) * g)    v = fma(b2, v, ((1 - b2) * g) * g)
    master = fma(-lr / (1 - b1^t), m / fma(sqrt(v), 1 / sqrt(1 - b2^t), eps), master * (1 - lr * weight_decay))
"""

import math
from collections.abc import Sequence

import torch

from zerogap.ops.cpu import optim as kernels


def global_norm(gradients: Sequence[torch.Tensor]) -> float:
    """Euclidean norm over all gradients together.

    Args:
        gradients: FP32, in checkpoint-name order.

    Returns:
        The norm as a double; NaN or infinity where a gradient is not finite.
    """
    level = [s for gradient in gradients for s in kernels.square_sums(gradient).tolist()]
    while len(level) > 1:
        pairs = [a + b for a, b in zip(level[0::2], level[1::2])]
        level = pairs + level[len(pairs) * 2 :]
    return math.sqrt(level[0]) if level else 0.0


def adamw(
    master: torch.Tensor,
    gradient: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    *,
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    gradient_scale: float = 1.0,
) -> None:
    """One update, in place on the master and both moments; the published weight is the caller's to renew.

    Args:
        master, first, second: FP32, same shape; the moments start at +0.
        gradient: FP32, same shape; read only.
        step: number of this update, from 1 (bias correction).
        gradient_scale: multiplies the gradient first (clipping).
    """
    assert step >= 1, f"updates count from 1, not {step}"
    beta1, beta2 = betas
    kernels.adamw(
        master,
        first,
        second,
        gradient,
        gradient_scale=gradient_scale,
        beta1=beta1,
        rest1=1.0 - beta1,
        beta2=beta2,
        rest2=1.0 - beta2,
        decay=1.0 - learning_rate * weight_decay,
        step_size=learning_rate / (1.0 - beta1**step),
        root_correction=1.0 / math.sqrt(1.0 - beta2**step),
        eps=eps,
    )


def tree_add(destination: torch.Tensor, source: torch.Tensor) -> None:
    """destination += source, FP32, elementwise: one node of a tree over leaves, bins or the parts of a tied weight."""
    kernels.add(destination, source, destination)
