"""AdamW over FP32 masters, with global-norm clipping and learning-rate schedules.

The arithmetic is `ops.optim`; this file owns the state and decides which numbers go in. Weight decay applies to
matrices and embeddings, never to norms and biases (the usual convention of transformers' trainers).
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import torch

from zerogap.errors import ConfigError, NonFiniteError
from zerogap.ops.handle import WeightHandle
from zerogap.ops.optim import adamw, global_norm


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
    """AdamW and its schedule.

    Attributes:
        learning_rate: peak learning rate.
        schedule: `constant`, `linear` or `cosine` (both fall to 0 at `total_updates`).
        warmup_updates: updates over which the rate rises linearly from 0.
        total_updates: updates of the whole run; needed by `linear` and `cosine`.
        betas, eps, weight_decay: as in Loshchilov & Hutter, "Decoupled Weight Decay Regularization".
        max_grad_norm: gradients are scaled down to this global norm; 0 switches clipping off.
    """

    learning_rate: float = 1e-6
    schedule: str = "constant"
    warmup_updates: int = 0
    total_updates: int | None = None
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        if self.schedule not in ("constant", "linear", "cosine"):
            raise ConfigError("optimizer.schedule", self.schedule, "choose constant, linear or cosine")
        if self.schedule != "constant" and not self.total_updates:
            raise ConfigError("optimizer.total_updates", self.total_updates, f"{self.schedule} needs the run's length")

    def rate(self, update: int) -> float:
        """Learning rate of update number `update` (from 0)."""
        if update < self.warmup_updates:
            return self.learning_rate * (update + 1) / self.warmup_updates
        if self.schedule == "constant":
            return self.learning_rate
        assert self.total_updates is not None
        span = max(1, self.total_updates - self.warmup_updates)
        done = min(1.0, (update - self.warmup_updates) / span)
        return self.learning_rate * (
            1.0 - done if self.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        )


@dataclasses.dataclass(frozen=True)
class OptimizerStep:
    """What an update did: global gradient norm before clipping, learning rate, update number (from 1)."""

    grad_norm: float
    learning_rate: float
    update: int


class AdamW:
    """State of AdamW for handles in checkpoint-name order. Mutated by `step` and `load_state`."""

    def __init__(self, handles: Sequence[WeightHandle], settings: OptimizerSettings) -> None:
        self.handles, self.settings = list(handles), settings
        self.updates = 0
        self.first = [torch.zeros(h.spec.shape) for h in self.handles]
        self.second = [torch.zeros(h.spec.shape) for h in self.handles]

    def step(self, gradients: Sequence[torch.Tensor], learning_rate: float | None = None) -> OptimizerStep:
        """One update of the masters, then the published weights.

        Args:
            gradients: FP32, one per handle.
            learning_rate: instead of the schedule's.

        Raises:
            NonFiniteError: the global gradient norm is not finite; names the first tensor, and nothing was changed. Or
                the update itself left a weight that cannot be quantised; names update, learning rate and tensor, and
                the weights are lost.
        """
        norm = global_norm(gradients)
        if not math.isfinite(norm):
            bad = next(
                (h.spec.name for h, g in zip(self.handles, gradients, strict=True) if not torch.isfinite(g).all()),
                "no single tensor: the sum of squares overflows",
            )
            raise NonFiniteError(
                f"update {self.updates + 1}: the gradient is not finite in {bad}; weights are unchanged"
            )
        s = self.settings
        scale = s.max_grad_norm / norm if s.max_grad_norm and norm > s.max_grad_norm else 1.0
        rate = s.rate(self.updates) if learning_rate is None else learning_rate
        self.updates += 1
        for handle, gradient, first, second in zip(self.handles, gradients, self.first, self.second, strict=True):
            assert handle.master is not None, f"{handle.spec.name} is not trainable"
            decay = 0.0 if handle.spec.kind == "vector" else s.weight_decay
            adamw(
                handle.master,
                gradient,
                first,
                second,
                learning_rate=rate,
                betas=s.betas,
                eps=s.eps,
                weight_decay=decay,
                step=self.updates,
                gradient_scale=scale,
            )
        self._publish(rate)
        return OptimizerStep(norm, rate, self.updates)

    def _publish(self, rate: float) -> None:
        for handle in self.handles:
            try:
                handle.publish()
            except NonFiniteError as error:
                raise NonFiniteError(
                    f"update {self.updates} at learning rate {rate:g}: {error}. The weights are lost: go on from the "
                    "last checkpoint with a lower optimizer.learning_rate"
                ) from None

    def state(self) -> dict[str, torch.Tensor]:
        """Masters and moments by name, FP32, live tensors."""
        named: dict[str, torch.Tensor] = {}
        for handle, first, second in zip(self.handles, self.first, self.second, strict=True):
            assert handle.master is not None
            name = handle.spec.name
            named |= {f"master/{name}": handle.master, f"first/{name}": first, f"second/{name}": second}
        return named

    def load_state(self, named: Mapping[str, torch.Tensor], updates: int) -> None:
        """Inverse of `state`: copies in place and publishes."""
        for name, tensor in self.state().items():
            tensor.copy_(named[name])
        for handle in self.handles:
            handle.publish()
        self.updates = updates
